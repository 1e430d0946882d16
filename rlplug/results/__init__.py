"""What runs are made into: lists, comparisons, plots and reports from run folders, without torch; exports and cards."""
