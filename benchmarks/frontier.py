"Loss against circuit size: dense networks of several widths, and recipe, RigL and SET at several densities"
import argparse,json,os,time,torch
from fastsparse.circuits import check_circuit,find_circuit,load_programs,make_task,programs,train_decoder,Trained
from pathlib import Path

densities = {o:1/o for o in (16,40,101,256)}  # the reciprocals are the names
widths = (16,32,64,128)
tasks = 'loop_words opens_block indentation quotes brackets'.split()
rates = dict(recipe=6e-3, rigl=1e-2, set=1e-2, dense=4e-3)

def size(method, o): return dict(d=o) if method=='dense' else dict(density=densities[o])
def sizes(method): return widths if method=='dense' else tuple(densities)

def write(file, text):
    "Write a file whole or not at all"
    part = file.with_name(f'{file.name}.{os.getpid()}')
    part.write_text(text)
    part.replace(file)

def taken(file):
    "Mark a job as taken; True if another process that is alive has it"
    mark = file.with_name(file.name+'.taken')
    try:
        with os.fdopen(os.open(mark, os.O_CREAT|os.O_EXCL|os.O_WRONLY), 'w') as f: f.write(str(os.getpid()))
        return False
    except FileExistsError:
        try:
            os.kill(int(mark.read_text() or 0), 0)
            return True
        except (ProcessLookupError, FileNotFoundError):
            mark.unlink(missing_ok=True)
            return taken(file)

def choose(out, data, method, o, n_steps):
    "The rate (and annealing) of the lowest validation loss after a short run with another seed; a best rate at the edge moves the edge"
    file = out/f'choice_{method}_{o}.json'
    tried = json.loads(file.read_text())['tried'] if file.exists() else []
    def loss(i, anneal=.5):
        for t in tried:
            if (t['i'],t['anneal'])==(i,anneal): return t['loss']
        kw = dict(lr=rates[method]*2**i, **(dict(anneal=anneal) if method=='recipe' else {}))
        trained = train_decoder(method, data, n_steps, seed=100, progress=False, **size(method, o), **kw)
        tried.append(dict(i=i, anneal=anneal, loss=trained.valid_loss, kw=kw))
        write(file, json.dumps(dict(tried=tried)))
        return trained.valid_loss
    ends = [-1,0,1]
    while True:
        best = min(ends, key=loss)
        if best not in (ends[0],ends[-1]) or abs(best)==6: break
        ends.append(best+1 if best>0 else best-1)
        ends.sort()
    if method=='recipe': loss(best, .8)
    write(file, json.dumps(dict(tried=tried, best=min(tried, key=lambda t: t['loss'])['kw']), indent=1))

def train(out, data, method, o, seed, n_steps):
    ends = sizes(method)[0],sizes(method)[-1]
    near = ends[sizes(method).index(o)*2//len(sizes(method))]
    kw = json.loads((out/f'choice_{method}_{near}.json').read_text())['best']
    t = train_decoder(method, data, n_steps, seed=seed, progress=False, **size(method, o), **kw)
    t.save(out/f'{method}_{o}_{seed}.part')
    (out/f'{method}_{o}_{seed}.part').replace(out/f'{method}_{o}_{seed}.pt')
    print(method, o, seed, t, f'{t.train_seconds:.0f} s', kw, flush=True)

def search(out, method, o, seed, task):
    "The circuit of a task in a network, and its tests, as a row"
    name = f'{method}_{o}_{seed}'
    t,start = Trained.load(out/f'{name}.pt'),time.process_time()
    c = find_circuit(t.model, make_task(task), xb=programs(200, 'means')[0][:,:-1], starts=1, seed=seed, progress=False)
    seconds = time.process_time()-start
    row = dict(method=method, size=o, seed=seed, task=task, valid_loss=t.valid_loss, train_seconds=t.train_seconds, live_weights=t.live_weights,
        found=c.found, search_seconds=seconds, **check_circuit(t.model, c, make_task(task, 100, seed=1), seed=seed))
    if c.found: c.save(out/f'{name}_{task}.circuit')
    write(out/f'{name}_{task}.json', json.dumps(row))
    print(name, c, f'{seconds:.0f} s', flush=True)

def jobs(out, data, seeds, n_steps, n_choice):
    "Tuples of the file that a job writes, whether it is written, whether it can begin, a function, and its arguments"
    def chosen(file): return file.exists() and 'best' in json.loads(file.read_text())
    choice = [(m, o, out/f'choice_{m}_{o}.json') for m in rates for o in (sizes(m)[0],sizes(m)[-1])]
    for m,o,f in choice: yield f,chosen(f),True,choose,(out,data,m,o,n_choice)
    ready = all(chosen(f) for *_,f in choice)
    for seed in range(seeds):
        for i in range(4):
            for m in rates:
                o = sizes(m)[i]
                f = out/f'{m}_{o}_{seed}.pt'
                yield f,f.exists(),ready,train,(out,data,m,o,seed,n_steps)
        for task in tasks:
            for i in range(4):
                for m in rates:
                    o = sizes(m)[i]
                    f = out/f'{m}_{o}_{seed}_{task}.json'
                    yield f,f.exists(),(out/f'{m}_{o}_{seed}.pt').exists(),search,(out,m,o,seed,task)

def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument('out', type=Path)
    p.add_argument('--seeds', type=int, default=3)
    p.add_argument('--steps', type=int, default=1500)
    p.add_argument('--choice', type=int, default=500)
    a = p.parse_args()
    torch.set_num_threads(1)
    a.out.mkdir(parents=True, exist_ok=True)
    data = load_programs()
    while True:
        todo = [j for j in jobs(a.out, data, a.seeds, a.steps, a.choice) if not j[1]]
        if not todo: break
        for file,_,ready,f,args in todo:
            if not ready or taken(file): continue
            try: f(*args)
            finally: file.with_name(file.name+'.taken').unlink()
            break
        else: time.sleep(5)

if __name__=='__main__': main()
