"""The HTTP face of the engine. Imports no torch."""
