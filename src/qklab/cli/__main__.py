from qklab.cli import main

main()
