from headrace.serving.cli import main

raise SystemExit(main())
