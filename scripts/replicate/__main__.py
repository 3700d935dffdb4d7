from scripts.replicate.run import main

main()
