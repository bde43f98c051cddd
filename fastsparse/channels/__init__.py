"Whole channels: which go together, and pruning them"
