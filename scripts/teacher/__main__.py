from scripts.teacher.train import main

main()
