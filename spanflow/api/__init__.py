"""What an author writes queries with."""
