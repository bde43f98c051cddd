"`python -m fastsparse.circuits`: train dense and sparse, find circuits, test them, draw them"
from fastsparse.circuits.run import main

main()
