"""New weights for the servers, and the proof that they have them."""
