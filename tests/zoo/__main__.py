"""`python -m tests.zoo`."""

from tests.zoo.run import main

if __name__ == "__main__":
    main()
