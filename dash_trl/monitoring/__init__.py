"""What is counted, shown and drawn."""
