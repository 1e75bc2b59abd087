from softsm.cli import main

main()
