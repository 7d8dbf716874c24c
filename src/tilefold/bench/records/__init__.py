"""What runs leave: records, documents that show them, two runs compared, and their history."""
