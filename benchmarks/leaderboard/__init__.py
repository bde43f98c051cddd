"Every method and its peers on real data, at equal FLOPs and at equal steps"
