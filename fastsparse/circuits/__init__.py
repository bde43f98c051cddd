"Weight-sparse transformers, and the parts of them that a person can read"
from fastsparse.circuits.language import make_task,nonsense,programs,show_tokens,Task,tasks,vocab,Writer
from fastsparse.circuits.model import AbsTopK,Decoder,gpt2_links,Link
from fastsparse.circuits.train import keep_largest_,KeepLargest,load_programs,train_decoder,Trained
