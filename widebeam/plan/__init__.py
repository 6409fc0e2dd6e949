"""`widebeam plan`: what a model needs of a GPU, and how much a GPU does. Imports no torch."""
