"""Which candidates are legal: catalogs, their index, and building semantic IDs."""
