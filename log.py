import sys,json,os
open("/tmp/chk/log.jsonl","a").write(json.dumps([os.environ.get("BM"),sys.argv[1:]])+"\n")
