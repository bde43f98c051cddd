"`python -m fastsparse` is the command `fastsparse`"
from .cli import main

if __name__=='__main__': main()
