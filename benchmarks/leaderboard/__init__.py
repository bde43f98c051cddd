"Sparse and dense networks of any width at equal processor seconds, on real data"
