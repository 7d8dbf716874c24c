"""What runs leave: records, documents that show them, and two runs compared."""
