"""Files that ship with Tandem."""
