"Masks that are learned"
