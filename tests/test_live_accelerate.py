"accelerate around live weights: the checks of its own test script, and its files, in a process of their own"
import pytest
from forks import run_code

accelerated = '''
import torch
from helpers import *
from fastsparse.all import *
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import set_seed
from accelerate.utils.dataclasses import DataLoaderConfiguration,GradientAccumulationPlugin
from torch.utils.data import DataLoader,TensorDataset
torch.set_num_threads(1)

def data(): return DataLoader(TensorDataset(torch.randn(64, 6, generator=torch.Generator().manual_seed(0)), torch.randn(64, 3, generator=torch.Generator().manual_seed(1))), batch_size=8)
def made(live):
    m = mlp((6,16,12,3))
    sparsify_model(m, .6, seed=0)
    opt = torch.optim.AdamW(m.parameters(), .01)
    if live: go_live(m, opt)
    return m,opt
def loss_of(m, x, y): return nn.functional.mse_loss(m(x), y)

def plain(n_acc=1):
    m,opt = made(False)
    for _ in range(3):
        for i,(x,y) in enumerate(data()):
            (loss_of(m, x, y)/n_acc).backward()
            if (i+1)%n_acc: continue
            opt.step()
            opt.zero_grad()
    return m

def trained(n_acc=1, clip=None, save=None, **kwargs):
    "training_check of accelerate's test script"
    AcceleratorState._reset_state(True)
    acc,(m,opt),dl = Accelerator(cpu=True, gradient_accumulation_steps=n_acc, **kwargs),made(True),data()
    dl,m,opt = acc.prepare(dl, m, opt)
    for epoch in range(3):
        for x,y in dl:
            with acc.accumulate(m):
                acc.backward(loss_of(m, x, y))
                if clip and acc.sync_gradients: acc.clip_grad_norm_(m.parameters(), clip)
                opt.step()
                opt.zero_grad()
        if save and epoch==1:
            acc.save_state(save)
            acc.load_state(save)
    m = acc.unwrap_model(m).cpu()
    assert all(is_live(o.p) for o in masked_params(m))
    assert_index_fits(m)
    return m

def same(a, b, tol=1e-5):
    b(torch.zeros(1, 6))
    for p,q in zip(a.parameters(), b.parameters()): torch.testing.assert_close(dense_of(p), q.detach(), rtol=tol, atol=tol)

def check(name, f):
    try: f(); print(name, 'right', flush=True)
    except Exception as e: print(name, type(e).__name__, str(e)[:300].replace(chr(10), ' '), flush=True)
check('plain', lambda: same(trained(), plain()))
check('split', lambda: same(trained(dataloader_config=DataLoaderConfiguration(split_batches=True)), plain()))
check('seedable', lambda: same(trained(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True)), plain()))
check('accumulated', lambda: same(trained(2), plain(2)))
check('clipped', lambda: same(trained(clip=1e4), plain()))
check('bf16', lambda: same(trained(mixed_precision='bf16'), plain(), .1))
check('saved', lambda: same(trained(save={folder!r}), plain()))
def moved():
    from accelerate.utils import set_module_tensor_to_device
    m,_ = made(True)
    set_module_tensor_to_device(m, '0.weight', 'cpu', torch.ones(16, 6))
    assert_index_fits(m)
    assert dense_of(m[0].weight)[m[0].weight_mask].eq(1).all()
check('set_module_tensor', moved)
def state_dict():
    AcceleratorState._reset_state(True)
    acc,(m,_) = Accelerator(cpu=True),made(True)
    sd = acc.get_state_dict(acc.prepare(m))
    assert dense_of(sd['0.weight']).equal(dense_of(m[0].weight))
    acc.save_model(m, {folder!r}+'/model')
    from safetensors.torch import load_file
    assert load_file({folder!r}+'/model/model.safetensors')['0.weight'].equal(dense_of(m[0].weight))
check('save_model', state_dict)
'''
parts = 'plain split seedable accumulated clipped bf16 saved set_module_tensor save_model'.split()
@pytest.fixture(scope='module')
def checks(tmp_path_factory):
    pytest.importorskip('accelerate')
    d = tmp_path_factory.mktemp('accelerate')
    done = run_code(accelerated.replace('{folder!r}', repr(str(d/'state'))), CUDA_VISIBLE_DEVICES='')
    return {o.split()[0]:o.partition(' ')[2] for o in done.stdout.splitlines() if o.split()[:1] and o.split()[0] in parts},done

@pytest.mark.parametrize('name', parts)
def test_accelerate(name, checks):
    "A prepared model ends as a plain masked loop, and its files are dense"
    ends,done = checks
    assert ends.get(name)=='right', (ends.get(name), done.returncode, done.stderr[-500:])
