"Weight-sparse transformers, and the parts of them that a person can read"
from fastsparse.circuits.language import make_task,nonsense,programs,show_tokens,Task,tasks,vocab,Writer
from fastsparse.circuits.model import AbsTopK,Decoder,gpt2_links,Link
from fastsparse.circuits.train import keep_largest_,KeepLargest,load_programs,train_decoder,Trained
from fastsparse.circuits.checkpoints import load_circuit_model
from fastsparse.circuits.search import calibrate,check_circuit,Circuit,core,disjoint_circuits,edges_of,faithfulness_table,find_circuit
from fastsparse.circuits.search import margins,node_means,node_values,overlap,shuffled,task_loss,together
from fastsparse.circuits.draw import circuit_page,draw_circuit,node_words,plot_edges
from fastsparse.circuits.run import edge_ratios
