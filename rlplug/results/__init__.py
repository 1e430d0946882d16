"""What finished runs are made into. Reads run folders and imports no trainer."""
