"What is on the site: its parts in their order, the names of the API by what one wants to do, and what people search for"

# The parts of the sidebar: the first page of each, what the sidebar calls it, and globs of the pages that are folded below it
def guides(folder, names): return [f'{folder}/{o}' for o in names.split()]
smaller = guides('tutorials', 'fine_tuning pictures deployment')+guides('howto', 'channels cut_heal_load detector quantize stay_sparse share sparse_or_narrow')
train = guides('tutorials', 'plain_pytorch tables text transformers control many_processes')+guides('howto',
    'choose faster faster_on_a_card save resume works_with mixed_precision lightning accelerate billion own_layers *')
study = [*guides('concepts', 'anatomy update exact_counts initialisation *'), 'howto/own_method', 'howto/reproduce', 'leaderboard', 'measured']
parts = {'howto/smaller_faster': ('Make a trained network smaller and faster', smaller), 'tutorials/digits_with_fastai': ('Train a sparse network', train),
    'tutorials/research': ('Study methods', study), 'tutorials/circuits': ('Read a network', ['tutorials/*'])}
reference = ['howto/messages', 'howto/names', 'coming_from', 'cli']

# What the sidebar folds, too: the API, and the internals room by room; the last takes every page that nothing else names
rooms = dict(core='Checks, names and patterns: what has nothing to do with masks', masks='Which weights live: selection, structures, distributions, schedules, scores',
    weights='One masked parameter: the weight, hooks, optimizers, loads', model='A model and its masks: layers, initialisation, choosing, `sparsify_model`',
    train='Training: method, engine, loop, presets, callback, `fit_sparse`', kernels='Products of live weights, and which of two functions is faster',
    live='Weights that store live values only: the tensor, its products, when they pay', special='Special structures, distributions and starting masks', card='Graphics cards: which blocks pay, and choosing there',
    shards='Weights sharded over processes', learned='Masks that are learned', trainers='Hugging Face, Lightning, trackers', save='Files: runs, checkpoints, masks, rules',
    report='Reports: the summary, FLOPs, costs, history, pictures', methods='Methods beyond the usual ones', prune='Pruning at once', cut='Removing channels, heads, experts and layers', deploy='Export, and search', compat="Other libraries' words",
    circuits='Circuits: weight-sparse transformers, and the few nodes that do a task', more='Data and networks of the examples')
folds = {'api/index': ['api/*']} | {f'internals/{o}': [f'{o}.*'] for o in rooms} | {'internals/more': ['*']}

# A picture for each tutorial and the first page, by the id of the cell that draws it, and the cell that shows a circuit to click
thumbs = {'howto/smaller_faster': '5mf00p1c'} | {f'tutorials/{k}': v for k,v in dict(fine_tuning='619645c2', digits_with_fastai='2ccbb954', plain_pytorch='42fc3c93', pictures='98eba253', tables='e7c05659', text='cee6a1c4', transformers='4f9ac9b9',
    control='fb754023', research='be5bc348', deployment='1e8982e9', many_processes='03d3b922', own_text='b52draw0').items()}
circuit = 'c1rc3003'

# Titles of guides that share their notebook with a module
titles = dict(cli='From the command line')

# Pages of the API: title, line below it, names. `Learner.` is for methods that the library adds to fastai's learner
api = dict(
    train=('Train', 'One line, a callback, a loop of your own, or the trainer that you have', '''Learner.fit_sparse Learner.fine_tune_sparse DynamicSparseTrainingCallback DynamicSparseTraining
        SparseTrainerCallback SparseLightningCallback SparseEngine'''),
    choose=('Find sparsity and learning rate', 'Let your own data answer', 'find_sparsity compare_with_narrow Learner.sparse_lr_find'),
    sparsify=('Make a model sparse', 'Masks on a model, what they cover, and how to be rid of them', '''sparsify_model sparse_summary sparse_params unsparsify sparsify_parameter unsparsify_parameter
        apply_masks register_layer sparseable_modules is_sparseable_module init_kaiming_normal_sparse_'''),
    distributions=('Share weights out among layers', 'How sparse is each layer?', '''erdos_renyi_sparsity uniform_sparsity first_layer_dense_uniform layers_dense
        balanced_flops_sparsity global_sparsity given_sparsity'''),
    structures=('Patterns in the masks', 'N of M, blocks, constant fan-in', 'NM Block FanIn as_structure'),
    methods=('Methods by name', 'RigL, SET and the others: settings that name their parts', 'methods_table RigL_presets SET_presets SNFS_presets'),
    own_method=('Parts of a method of your own', 'Scores, redistribution, times, and how a part says what it needs', '''declares register_method weight_magnitude gradient_magnitude
        gradient_momentum gradient_saliency fisher_saliency MagnitudePlusGradient MeanGradient SampledGradient random_score momentum_redistribution gradient_redistribution Interval Schedule
        CubicSchedule FreqSchedule given_value'''),
    rules=('Other settings for some layers', 'Rules by name', 'configure'),
    prune=('Prune a trained model', 'Choose weights once, with or without data', '''prune_magnitude prune_wanda prune_sparsegpt prune_refit prune_snip prune_grasp
        prune_synflow prune_channels prune_tokens ChannelPruning taylor_scores channel_groups prune_to find_ticket'''),
    finetune=('Stay sparse while fine-tuning', 'Zeros that stay, adapters that merge into them, and one small file a task', 'keep_zeros mask_adapters merge_sparse save_delta load_delta'),
    learned=('Learn the masks', 'Straight-through estimators and scores that are trained', 'learn_masks fold_masks LearnedMaskCallback mask_penalty Sparsify'),
    save=('Save, resume and load', 'Whole checkpoints, and models that come back with their masks', 'SparseCheckpoint save_run load_run WaitForSparsity save_sparse load_sparse load_cut'),
    deploy=('Compute fast and deploy', 'Live weights only, smaller models, files for servers', 'sparse_compute store_dense export_sparse plain_copy shrink pack narrow_like'),
    look=('Look at a run', 'Topologies, history, costs', 'plot_topology animate_masks SparseHistory log_updates count_flops flop_profile FlopsCounter predict_cost'),
    masks=('Masks as tensors', 'From scores and counts to masks', 'sparse_mask sparse_mask_like top_k_mask mask_from_tensor sparsity_from_tensor maybe_float'))

# What people search for, where it is answered first; the words are found one by one as well
searches = {
    'index': 'install, pip install, windows, macos, m1 mac, linux',
    'howto/smaller_faster': '''make a model smaller, smaller and faster, faster, faster inference, speed up inference, why is it not faster, not faster, how sparse, phone, android, ios, iphone, mobile, edge,
        Raspberry Pi, arm, MNN, XNNPACK, tflite, LiteRT, openvino, core ml, coreml, apple, amx, compress a model, model compression, deepsparse, laptop''',
    'tutorials/digits_with_fastai': 'getting started, quickstart, first steps, sparse training, fit_sparse tutorial',
    'tutorials/plain_pytorch': 'pytorch loop, without fastai, custom training loop, rnn, gru, lstm',
    'tutorials/pictures': '''image classification, vision_learner, cnn, resnet, computer vision, picture classifier, pretrained, transfer learning,
        fine_tune, fine tune, fine_tune_sparse tutorial, freeze, unfreeze, frozen layers''',
    'tutorials/tables': 'tabular_learner, tabular data, csv, data frame, feature selection',
    'tutorials/text': 'text classification, AWD_LSTM, nlp, sentiment, fastai text, language model',
    'tutorials/transformers': 'hugging face, hugging face bert, bert, transformers, gpt, gpt-2, llm, Trainer, fine-tune a language model, small language model',
    'tutorials/control': 'reinforcement learning, gymnasium, cartpole, policy',
    'tutorials/fine_tuning': '''prune, prune a pretrained model, prune a model, prune a trained network, pruning, one-shot pruning, post-training pruning, wanda, sparsegpt, 2:4 sparsity,
        pretrained network, pretrained model, not fastai, distillation, teacher, knowledge distillation, sentence encoder, compress a pretrained model, prune_refit, MiniLM, sentence-transformers,
        prune further, llm-compressor, llmcompressor, smaller model step by step''',
    'howto/cut_heal_load': '''cut a llama, remove layers, remove experts, remove heads, narrower, width pruning, depth pruning, heal a pruned model, REAP,
        gguf, llama.cpp, vllm, from_pretrained after pruning, save_pretrained after pruning, per_layer_config, unequal layers, layers of different sizes''',
    'howto/detector': '''yolo, yolov5, yolov8, ultralytics, object detection, detector, prune yolo, bounding boxes, csp, c2f, c3, sppf, real-time detection''',
    'tutorials/research': 'research, new method, compare with RigL, grow score, ablation, experiment',
    'tutorials/deployment': 'deploy, server, onnx, onnxruntime, inference, production, serving, torchscript',
    'tutorials/many_processes': 'distributed, many processes, several gpus, multi gpu, ddp, fsdp, fully_shard, torchrun',
    'howto/lightning': 'lightning, pytorch lightning, LightningModule, lightning callback',
    'howto/works_with': 'torch.compile, compile, EMA, exponential moving average, AveragedModel, SWA, mixup, cutmix, early stopping, EarlyStoppingCallback, SaveModelCallback, label smoothing',
    'howto/messages': '''error, errors, warning, warnings, error message, troubleshooting, faq, ValueError, it says, what does this error mean, the model is sparse already, nan, nan loss, loss is nan,
        keyword inputs, inputs by name, input_ids, attention_mask, tokenizer, batch is a dict, kwargs''',
    'howto/accelerate': 'accelerate, Accelerator, accelerate loop, gradient accumulation',
    'howto/mixed_precision': 'mixed precision, amp, autocast, bf16, fp16, bfloat16, half precision, GradScaler, gradient clipping, clip_grad_norm_',
    'howto/share': 'hub, huggingface, huggingface hub, push_to_hub, from_pretrained, model card, share a model, upload a model',
    'howto/sparse_or_narrow': 'narrow network, smaller network, width, small dense, sparse or dense, is sparse worth it, when to use sparsity, compare_with_narrow',
    'howto/quantize': 'quantize, quantization, int8, 8 bit, quantize_dynamic, quantize_static, prune and quantize, sparse and quantized',
    'tutorials/own_text': 'own tokens, own tokenizer, train on source code, bpe, circuit of own text, circuit_sparsity, sparse_pretrain',
    'tutorials/circuits': 'interpretability, mechanistic interpretability, circuits, weight-sparse transformer, explain a network, wiring',
    'howto/choose': 'which sparsity, which method, which learning rate, how many epochs, hyperparameters, best sparsity',
    'howto/faster': 'faster training, speed up training, speedup, acceleration, slow training, sparse kernels, cpu',
    'howto/faster_on_a_card': 'gpu, graphics card, cuda, faster on a gpu, block sparse, triton, H100, A100',
    'howto/own_layers': 'custom layers, own layers, custom modules, exclude layers, keep a layer dense, choose layers',
    'howto/own_method': 'own method, custom method, custom score, write a method',
    'howto/reproduce': 'reproduce a paper, paper settings, replicate, original hyperparameters, erk',
    'howto/names': 'cheat sheet, list of names, all functions, reference, api, overview',
    'howto/resume': 'resume, checkpoint, continue training, restart after a crash',
    'howto/save': '''save and load, learn.load, learn.save, load_learner, load_state_dict, load_from_checkpoint, unexpected key, unexpected keys in state_dict, weight_mask, state_dict, save_pretrained,
        load a sparse model, restore, missing masks,
        smaller files, file size, compress checkpoint, model size, safetensors''',
    'howto/channels': '''structured pruning, channel pruning, filter pruning, prune filters, prune channels, prune heads, head pruning, torch_pruning, DepGraph, dependency graph,
        remove neurons, slim network, as large as before''',
    'howto/billion': 'billion weights, large model, huge layer, out of memory, meta device, wide network, torch.device meta, does not fit in memory',
    'howto/stay_sparse': 'LoRA, peft, adapter, stay sparse, fine-tune a pruned model, keep zeros, merge',
    'concepts/anatomy': 'anatomy, how does it work, drop and grow, dynamic sparse training',
    'concepts/exact_counts': 'exact counts, budget, density of layers, rounding',
    'concepts/update': 'what an update does, topology update, regrow',
    'concepts/initialisation': 'initialisation, initialization, does not learn, chance accuracy, dead network, stuck at chance',
    'concepts/products': 'sparse products, sparse matrix multiplication, why is sparse slow',
    'coming_from': 'migrate, alternatives, fasterai, torch.nn.utils.prune, torchao, cerebras, sparselab, sparseml, neural compressor, modelopt, Torch-Pruning, move from another library',
    'measured': 'benchmark, benchmarks, measurements, timings',
    'leaderboard': 'leaderboard, compare methods, best method, equal seconds',
    'api/look': 'plot topology, tensorboard, wandb, mlflow, flops',
    'api/methods': 'list of methods, RigL, SET, GSE, SNFS, GraNet, MEST, GMP, AC/DC',
    'api/prune': 'prune a trained model, magnitude pruning, lottery ticket'}
