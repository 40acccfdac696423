"""Everything that replaces a part of torch while a card is simulated: under one lock, undone on every way out."""
