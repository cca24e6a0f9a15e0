from examples.demo.run import main

main()
