"""The methods of the papers: each a short function over layers and statistics; none imports another."""
