"""`greenlane verify`: compares an engine's answers with a reference, shape by shape."""
