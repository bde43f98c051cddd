"""Whatever moves, copies, converts or saves a live weight ends right or with one clear error, never with a crash, and its index fits afterwards.
Cases run in another process; those that may ruin memory in forks of it, so that a crash is told as one"""
import copy,ctypes,io,json,os,pickle,pytest,re,signal,sys,tempfile,threading
import numpy as np,torch,torch.nn.functional as F
from fastsparse.all import *
from fastsparse.live import products
from fastsparse.live.weight import store_live
from forks import run_code
from helpers import *
from torch import nn

def net(dtype=torch.float):
    torch.manual_seed(0)
    m = nn.Sequential(nn.Flatten(), nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 5)).to(dtype)
    sparsify_model(m, .7, 'uniform', seed=0)
    go_live(m)
    return m

def batch(m): return torch.randn(6, 3, 2, 2, generator=torch.Generator().manual_seed(0)).to(m[5].bias.dtype)
def out(m):
    with torch.no_grad(): return m(batch(m)).double()

def close(a, b, tol=1e-5): torch.testing.assert_close(a, b, rtol=tol, atol=tol)
def mat(m): return m[3].weight
def plain_net(m):
    "The same weights in a network without masks"
    new = nn.Sequential(nn.Flatten(), nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 5)).to(m[5].bias.dtype)
    new.load_state_dict({k:dense_of(v) for k,v in m.state_dict().items() if not k.endswith(('mask','sparsity'))})
    return new

def whole(m, y, tol=1e-5):
    "The model computes `y`, trains a step as its dense weights do, and stays live"
    assert all(is_live(o.p) for o in masked_params(m))
    close(out(m), y, tol)
    m.zero_grad()
    m(batch(m)).square().mean().backward()
    d = plain_net(m)
    d(batch(m)).square().mean().backward()
    masks = {o.name:o.mask for o in masked_params(m)}
    for (n,p),q in zip(m.named_parameters(), d.parameters()): close(dense_of(p.grad), q.grad*masks.get(n, 1), max(tol, 1e-5))
    m.zero_grad()

cases,dangerous = {},{}
def case(f):
    cases[f.__name__] = f
    return f

def forked(f):
    "Runs in a process of its own"
    dangerous[f.__name__] = f
    return f

# --- a module's tensors

@case
def apply_clone(m):
    y = out(m)
    m._apply(lambda t: t.clone())
    whole(m, y)
@case
def apply_contiguous(m):
    y = out(m)
    m._apply(lambda t: t.detach().clone().contiguous())
    whole(m, y)
@case
def apply_times_two(m):
    before = dense_of(mat(m))
    m._apply(lambda t: t*2 if t.is_floating_point() else t)
    close(dense_of(mat(m)), 2*before)
@case
def apply_zeros(m):
    m._apply(lambda t: torch.zeros(t.shape) if t.is_floating_point() else t)
    assert dense_of(mat(m)).eq(0).all() and out(m).isfinite().all()
@case
def apply_twice(m):
    y = out(m)
    m._apply(lambda t: t.double() if t.is_floating_point() else t)._apply(lambda t: t.float() if t.is_floating_point() else t)
    whole(m, y)
@case
def double(m):
    y = out(m)
    m.double()
    whole(m, y)
    assert mat(m).dtype==torch.double
@case
def half_and_back(m):
    y = out(m)
    m.half().float()
    whole(m, y, 1e-2)
@case
def bfloat16(m):
    y = out(m)
    m.bfloat16()
    assert mat(m).dtype==torch.bfloat16
    close(out(m), y, 5e-2)
@case
def half(m):
    y = out(m)
    m.half()
    close(out(m), y, 1e-2)
@case
def to_with_gradients(m):
    m(batch(m)).square().mean().backward()
    g = dense_of(mat(m).grad)
    m.double()
    assert mat(m).grad.dtype==torch.double
    close(dense_of(mat(m).grad), g.double())
@case
def to_like_tensor(m):
    y = out(m)
    m.to(torch.ones(1, dtype=torch.double))
    whole(m, y)
@case
def cpu(m):
    y = out(m)
    m.cpu()
    whole(m, y)
@case
def to_meta(m):
    m.to('meta')
    assert mat(m).shape==(32,16) and mat(m).device.type=='meta'
@case
def to_meta_and_back(m):
    y,state = out(m),{k:dense_of(v) for k,v in m.state_dict().items()}
    m.to('meta')
    m.to_empty(device='cpu')
    m.load_state_dict(state)
    close(out(m), y)
@case
def tensor_to_meta(m):
    t = mat(m).to('meta')
    assert t.shape==(32,16) and t.device.type=='meta'
@case
def type_of_module(m):
    y = out(m)
    m.type(torch.double)
    whole(m, y)
@case
def swap_on_conversion(m):
    y = out(m)
    torch.__future__.set_swap_module_params_on_conversion(True)
    m.double()
    whole(m, y)
@case
def swap_on_conversion_with_optimizer(m):
    torch.__future__.set_swap_module_params_on_conversion(True)
    opt = torch.optim.SGD(m.parameters(), .1)
    m(batch(m)).square().mean().backward()
    opt.step()
    opt.zero_grad()
    m.double()
    m(batch(m)).square().mean().backward()
    opt.step()
    whole(m, out(plain_net(m)))
@case
def overwrite_on_conversion(m):
    y = out(m)
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    m.double()
    close(out(m), y)
@case
def swap_tensors(m):
    "With a dense parameter, and back"
    y,p,q = out(m),mat(m),nn.Parameter(torch.ones(32, 16))
    torch.utils.swap_tensors(p, q)
    assert mat(m).eq(1).all() and is_live(q)
    torch.utils.swap_tensors(p, q)
    whole(m, y)
@case
def swap_two_live(m):
    n,y = net(),out(m)
    with torch.no_grad(): mat(n).mul_(2)
    torch.utils.swap_tensors(mat(m), mat(n))
    close(dense_of(mat(m)), 2*dense_of(mat(n)))
    torch.utils.swap_tensors(mat(m), mat(n))
    whole(m, y)
def trains(m, live=()):
    "Three steps, with an update after the first: as the masked network that has its weights, masks held, state of the optimizer too"
    d = plain_net(m)
    sparsify_model(d, 0., mask_init={o.name:o.mask for o in masked_params(m)})
    both = [(n, torch.optim.SGD(n.parameters(), .1, momentum=.9)) for n in (m, d)]
    for i in range(3):
        for n,opt in both:
            n(batch(n)).square().mean().backward()
            opt.step()
            opt.zero_grad()
            if i==0:
                mask = n[3].weight_mask
                mask.copy_(mask.roll(1))
            n(batch(n))
    for (n,p),q in zip(m.named_parameters(), d.parameters()): close(dense_of(p), q, 1e-4)
    assert not any(dense_of(o.p)[~o.mask].any() for o in masked_params(m))
    assert all(is_live(o.p)==(o.name in live) for o in masked_params(m))

live_names = '1.weight','3.weight','5.weight'

@case
def to_meta_and_back_and_train(m):
    "Weights are live again then"
    to_meta_and_back(m)
    trains(m, live_names)
@case
def overwrite_and_train(m):
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    m.double().float()
    trains(m, live_names)
@case
def swap_dense_and_train(m):
    "What was swapped in is masked, and stored live again"
    torch.utils.swap_tensors(mat(m), nn.Parameter(torch.randn(32, 16, generator=torch.Generator().manual_seed(1))))
    m(batch(m))
    trains(m, live_names)
@case
def swap_dense_before_a_step(m):
    "With its own gradient; dead values go at the next forward"
    opt,new = torch.optim.SGD(m.parameters(), .1),nn.Parameter(torch.ones(32, 16))
    new.grad = torch.ones(32, 16)
    torch.utils.swap_tensors(mat(m), new)
    opt.step()
    m.train()(batch(m))
    close(dense_of(mat(m)), .9*m[3].weight_mask)
@case
def swap_live_and_train(m):
    "Another one's places are not those of the mask, and values stay where both live"
    n = net()
    n[3].weight_mask.copy_(n[3].weight_mask.roll(3))
    n.train()(batch(n))
    d = dense_of(mat(n))*m[3].weight_mask
    torch.utils.swap_tensors(mat(m), mat(n))
    m(batch(m))
    close(dense_of(mat(m)), d)
    trains(m, live_names)
@case
def replaced_in_the_dict_and_train(m):
    m[3]._parameters['weight'] = nn.Parameter(torch.randn(32, 16, generator=torch.Generator().manual_seed(1)))
    opt = torch.optim.SGD(m.parameters(), .1)
    m(batch(m)).square().mean().backward()
    opt.step()
    opt.zero_grad()
    trains(m, live_names)
@case
def load_state_dict_assign(m):
    y,state = out(m),{k:dense_of(v) for k,v in m.state_dict().items()}
    m.load_state_dict(state, assign=True)
    close(out(m), y)
@case
def load_own_state(m):
    y = out(m)
    m.load_state_dict(m.state_dict())
    whole(m, y)
@case
def load_other_masks(m):
    torch.manual_seed(0)
    n = nn.Sequential(nn.Flatten(), nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 5))
    sparsify_model(n, .5, 'uniform', seed=5)
    m.load_state_dict(n.state_dict())
    whole(m, out(n))
@case
def functional_call(m):
    y = out(m)
    close(torch.func.functional_call(m, {k:dense_of(p)*0 for k,p in m.named_parameters()}, batch(m)).detach(), torch.zeros(6, 5))
    whole(m, y)
@case
def share_memory(m):
    y = out(m)
    m.share_memory()
    assert mat(m).is_shared()
    if (pid := os.fork())==0:
        with torch.no_grad(): mat(m).mul_(2)
        os._exit(0)
    before = dense_of(mat(m))
    os.waitpid(pid, 0)
    with torch.no_grad(): mat(m).mul_(.5)
    whole(m, y)
@case
def share_memory_of_a_tensor(m):
    p = mat(m).data.share_memory_()
    assert p.is_shared() and mat(m).is_shared()
@case
def pickled_for_a_process(m):
    from multiprocessing.reduction import ForkingPickler
    close(pickle.loads(ForkingPickler.dumps(mat(m).detach())), dense_of(mat(m)))
    close(out(pickle.loads(ForkingPickler.dumps(m))), out(m))
@case
def quantized(m):
    from torch.ao.quantization import quantize_dynamic
    y,expect = out(m),quantize_dynamic(plain_net(m), {nn.Linear}, dtype=torch.qint8)(batch(m))
    q = quantize_dynamic(m, {nn.Linear}, dtype=torch.qint8)
    close(q(batch(m)), expect)
    whole(m, y)
# --- copies and files

@case
def deepcopy_of_a_model(m):
    n,y = copy.deepcopy(m),out(m)
    with torch.no_grad(): mat(n).mul_(0)
    whole(m, y)
@case
def deepcopy_of_a_parameter(m):
    t = copy.deepcopy(mat(m))
    assert isinstance(t, nn.Parameter) and t.requires_grad
    close(t.detach(), dense_of(mat(m)))
@case
def copy_of_a_parameter(m):
    t = copy.copy(mat(m))
    close(dense_of(t), dense_of(mat(m)))
    whole(m, out(m))
@case
def copy_of_a_model(m):
    n = copy.copy(m)
    close(out(n), out(m))
    assert mat(n) is mat(m)
@case
def pickle_of_a_model(m):
    close(out(pickle.loads(pickle.dumps(m))), out(m))
    whole(m, out(m))
@case
def pickle_of_views(m): close(pickle.loads(pickle.dumps(mat(m).data[2:4])), dense_of(mat(m))[2:4])
@case
def deepcopy_of_views(m): close(copy.deepcopy(mat(m).data[2:4]), dense_of(mat(m))[2:4])
@case
def deepcopy_of_a_run(m):
    opt = torch.optim.AdamW(m.parameters())
    for _ in range(2):
        m(batch(m)).square().mean().backward()
        opt.step()
        opt.zero_grad()
    n,o = copy.deepcopy((m,opt))
    for a,b in ((m,opt),(n,o)):
        a(batch(a)).square().mean().backward()
        b.step()
    close(out(m), out(n))
@case
def pickle_of_an_optimizer(m):
    opt = torch.optim.AdamW(m.parameters())
    m(batch(m)).square().mean().backward()
    opt.step()
    n,o = pickle.loads(pickle.dumps((m,opt)))
    for a,b in ((m,opt),(n,o)):
        a.zero_grad()
        a(batch(a)).square().mean().backward()
        b.step()
    close(out(m), out(n))
def through(f, o, **kwargs):
    f(o, b := io.BytesIO())
    return torch.load(io.BytesIO(b.getvalue()), **kwargs)
@case
def save_state(m):
    state = through(torch.save, m.state_dict(), weights_only=True)
    assert all(type(v) is torch.Tensor for v in state.values())
    for k,v in m.state_dict().items(): close(state[k], dense_of(v) if v.is_floating_point() else v)
    whole(m, out(m))
@case
def save_model(m): close(out(through(torch.save, m, weights_only=False)), out(m))
@case
def save_parameter(m):
    t = through(torch.save, mat(m), weights_only=True)
    assert type(t) is nn.Parameter
    close(t.detach(), dense_of(mat(m)))
@case
def save_gradient(m):
    m(batch(m)).sum().backward()
    close(through(torch.save, mat(m).grad, weights_only=True), dense_of(mat(m).grad))
@case
def save_view(m): close(through(torch.save, mat(m).data[1:3], weights_only=True), dense_of(mat(m))[1:3])
@case
def save_optimizer(m):
    opt = torch.optim.AdamW(m.parameters())
    m(batch(m)).square().mean().backward()
    opt.step()
    state = through(torch.save, opt.state_dict(), weights_only=True)
    opt.load_state_dict(state)
    m(batch(m)).square().mean().backward()
    opt.step()
    whole(m, out(m))
@case
def load_mapped(m):
    with tempfile.TemporaryDirectory() as d:
        torch.save(m.state_dict(), f'{d}/a.pt')
        state = torch.load(f'{d}/a.pt', mmap=True, weights_only=True)
        y = out(m)
        m.load_state_dict(state)
        whole(m, y)
@case
def safetensors_of_a_state(m):
    from safetensors.torch import load,load_file,save,save_file
    close(load(save(m.state_dict()))['3.weight'], dense_of(mat(m)))
    with tempfile.TemporaryDirectory() as d:
        save_file(m.state_dict(), f'{d}/a')
        close(load_file(f'{d}/a')['1.weight'], dense_of(m[1].weight))
    whole(m, out(m))
@case
def safetensors_of_a_model(m):
    from safetensors.torch import load_model,save_model
    with tempfile.TemporaryDirectory() as d:
        save_model(m, f'{d}/a')
        y = out(m)
        with torch.no_grad(): mat(m).zero_()
        load_model(m, f'{d}/a')
        whole(m, y)
@case
def distributed_checkpoint(m):
    import torch.distributed.checkpoint as dcp
    with tempfile.TemporaryDirectory() as d:
        y = out(m)
        dcp.save(m.state_dict(), checkpoint_id=d, no_dist=True)
        with torch.no_grad(): mat(m).zero_()
        state = m.state_dict()
        dcp.load(state, checkpoint_id=d, no_dist=True)
        m.load_state_dict(state)
        whole(m, y)

# --- memory

@case
def numpy_reads(m): close(torch.from_numpy(mat(m).detach().numpy().copy()), dense_of(mat(m)))
@case
def numpy_is_read_only(m):
    for a in (mat(m).detach().numpy(), mat(m).data[:2].numpy(), mat(m).detach().cpu().numpy()):
        try: a[0] = 1
        except ValueError: continue
        raise AssertionError('a write to the array is lost')
@case
def numpy_of_a_parameter(m):
    try: mat(m).numpy()
    except RuntimeError: return
    raise AssertionError("dense raises: Can't call numpy() on Tensor that requires grad")
@case
def array_is_right(m): close(torch.from_numpy(np.array(mat(m).detach())), dense_of(mat(m)))
@case
def array_is_read_only(m):
    a = np.asarray(mat(m).detach())
    close(torch.from_numpy(a.copy()), dense_of(mat(m)))
    assert not a.flags.writeable
@forked
def from_dlpack(m): close(torch.from_dlpack(mat(m).detach()), dense_of(mat(m)))
@forked
def to_dlpack(m): close(torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(mat(m).detach())), dense_of(mat(m)))
@forked
def numpy_from_dlpack(m): close(torch.from_numpy(np.from_dlpack(mat(m).detach()).copy()), dense_of(mat(m)))
@forked
def data_ptr(m):
    n = mat(m).numel()
    a = np.ctypeslib.as_array((ctypes.c_float*n).from_address(mat(m).data_ptr()))
    close(torch.from_numpy(a.copy()).view(32, 16), dense_of(mat(m)))
@forked
def data_ptr_of_a_view(m):
    v = mat(m).data[2:4]
    if p := v.data_ptr(): close(torch.from_numpy(np.ctypeslib.as_array((ctypes.c_float*32).from_address(p)).copy()).view(2, 16), dense_of(v))
@forked
def storage(m):
    mat(m).untyped_storage().nbytes()
    mat(m).storage_offset()
    mat(m).untyped_storage().data_ptr()
@forked
def typed_storage(m):
    mat(m)._typed_storage()
    mat(m).storage().size()
@forked
def storage_of_a_view(m):
    mat(m).data[1].untyped_storage().nbytes()
    mat(m).data[1].untyped_storage().data_ptr()
@forked
def storage_is_filled(m):
    mat(m).data.untyped_storage().fill_(0)
    assert dense_of(mat(m)).eq(0).all()
@case
def storages_differ(m): assert len({p.untyped_storage().data_ptr() for p in m.parameters()})==6 and len({p.data_ptr() for p in m.parameters()})==6
@forked
def as_subclass(m): close(mat(m).detach().as_subclass(torch.Tensor).clone(), dense_of(mat(m)))
@forked
def as_fastai_subclass(m):
    from fastai.torch_core import TensorBase
    close(torch.Tensor(mat(m).detach().as_subclass(TensorBase).clone().tolist()), dense_of(mat(m)))
@forked
def make_subclass(m): close(torch.Tensor._make_subclass(torch.Tensor, mat(m).detach()).clone(), dense_of(mat(m)))
@case
def buffer(m):
    b = nn.Buffer(mat(m).detach())
    close(dense_of(b), dense_of(mat(m)))
@case
def parameter_again(m):
    q = nn.Parameter(mat(m).data)
    close(dense_of(q), dense_of(mat(m)))
    whole(m, out(m))
@case
def new_parameter(m):
    y,m[3].weight = out(m),nn.Parameter(mat(m).data.clone())
    close(out(m), y)
@forked
def apply_(m):
    before = dense_of(mat(m))
    mat(m).data.apply_(lambda v: 2*v)
    close(dense_of(mat(m)), 2*before)
@forked
def map_(m):
    before = dense_of(mat(m))
    mat(m).data.map_(torch.ones(32, 16), lambda a,b: 2*a)
    close(dense_of(mat(m)), 2*before)
@case
def tensor_of_it(m): close(torch.tensor(mat(m).detach()), dense_of(mat(m)))
@case
def asarray(m): close(dense_of(torch.asarray(mat(m).detach())), dense_of(mat(m)))
@case
def legacy_tensor(m): close(torch.Tensor(mat(m).detach()), dense_of(mat(m)))
@case
def legacy_new(m): close(mat(m).detach().new(mat(m).detach()), dense_of(mat(m)))
@case
def legacy_type(m): close(mat(m).detach().type('torch.DoubleTensor'), dense_of(mat(m)).double())
@case
def items(m): assert mat(m)[0,0].item()==dense_of(mat(m))[0,0].item() and float(mat(m)[1,2])==dense_of(mat(m))[1,2].item()
@forked
def set_(m):
    with torch.no_grad(): mat(m).set_(torch.ones(32, 16))
@forked
def set_of_another(m):
    t = torch.empty(0)
    t.set_(mat(m).detach())
    close(t.clone(), dense_of(mat(m)))
@forked
def set_data_of_another(m):
    t = torch.empty(0)
    t.data = mat(m).detach()
    close(dense_of(t), dense_of(mat(m)))
@case
def set_data_of_another_shape(m): mat(m).data = torch.ones(3, 3)
@case
def sparse_layouts(m):
    close(mat(m).detach().to_sparse().to_dense(), dense_of(mat(m)))
    close(mat(m).detach().to_sparse_csr().to_dense(), dense_of(mat(m)))
@case
def mkldnn(m): close(mat(m).detach().to_mkldnn().to_dense(), dense_of(mat(m)))
@case
def quantized_tensor(m):
    a,b = [torch.quantize_per_tensor(t, .01, 0, torch.qint8).dequantize() for t in (mat(m).detach(), dense_of(mat(m)))]
    close(a, b)
@case
def printed(m): assert repr(mat(m)) and str(mat(m).data) and repr(mat(m).data[0]) and f'{mat(m)}' and repr(m)
@case
def collated(m): close(dense_of(torch.utils.data.default_collate([mat(m).detach(), mat(m).detach()])), dense_of(mat(m)).expand(2, 32, 16))
@case
def deleted_gradient(m):
    m(batch(m)).sum().backward()
    del mat(m).grad
    assert mat(m).grad is None
    whole(m, out(m))
@case
def viewed_as_bytes(m): close(mat(m).detach().view(torch.int32).view(torch.float).clone(), dense_of(mat(m)))
@case
def forward_in_inference_mode(m):
    y = out(m)
    with torch.inference_mode():
        close(m(batch(m)).double(), y)
        mat(m).t()
        mat(m).clone()
    whole(m, y)
@case
def traced(m):
    y = out(m)
    close(torch.jit.trace(m, batch(m))(batch(m)).double(), y)
@case
def fake(m):
    from torch._subclasses.fake_tensor import FakeTensorMode
    with FakeTensorMode(allow_non_fake_inputs=True) as mode: mode.from_tensor(mat(m))
@case
def compiled_reader(m): close(torch.compile(lambda w: (w*2).sum(), backend='eager')(mat(m)).detach(), 2*dense_of(mat(m)).sum())
@case
def garbage(m):
    "A view outlives its model"
    n = net()
    v,d = mat(n).data[2:4],dense_of(mat(n))[2:4]
    del n
    import gc
    gc.collect()
    close(dense_of(v), d)

# --- what may ruin the memory

@forked
def to_empty_and_load(m):
    y,state = out(m),{k:v.clone() for k,v in m.state_dict().items()}
    m.to_empty(device='cpu')
    m(batch(m))
    m.load_state_dict(state)
    whole(m, y)
@forked
def to_empty_by_swap(m):
    y,state = out(m),{k:v.clone() for k,v in m.state_dict().items()}
    torch.__future__.set_swap_module_params_on_conversion(True)
    m.to_empty(device='cpu')
    m(batch(m))
    m.load_state_dict(state)
    whole(m, y)
@forked
def to_empty_and_step(m):
    opt = torch.optim.SGD(m.parameters(), .1, momentum=.9)
    m(batch(m)).sum().backward()
    opt.step()
    m.to_empty(device='cpu')
    m(batch(m)).sum().backward()
    opt.step()

def told(f, forward=True):
    "How a case ends, 'right', 'wrong: ...' or an error, and whether the model's index still fits"
    m = net()
    try:
        f(m)
        end = 'right'
    except AssertionError as e: end = f'wrong: {e!s:.300}'
    except Exception as e: end = f'{type(e).__name__}: {e}'
    try:
        if mat(m).device.type!='meta':
            assert_index_fits(m)
            if forward and all(p.dtype==m[5].bias.dtype for p in m.parameters()): m(batch(m)).sum().backward()
            assert_index_fits(m)
        then = 'fits'
    except Exception as e: then = f'{type(e).__name__}: {e!s:.300}'
    return end,then

def told_by_a_fork(f):
    "The same; a crash is told as that"
    r,w = os.pipe()
    if (pid := os.fork())==0:
        signal.alarm(600)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        os.write(w, json.dumps(told(f, False)).encode())
        os._exit(0)
    os.close(w)
    with os.fdopen(r) as pipe: text = pipe.read()
    _,status = os.waitpid(pid, 0)
    return json.loads(text) if text else [f'crash: {signal.Signals(os.WTERMSIG(status)).name}','crash']

def run_all(path):
    "A line for each case; forks come first, while no backward has run and no kernel is compiled"
    torch.set_num_threads(1)
    out(net())  # what is imported or compiled for it is there in all forks
    with open(path, 'w') as file:
        for name,f in dangerous.items(): print(json.dumps([name, *told_by_a_fork(f)]), file=file, flush=True)
        for name,f in cases.items():
            print(json.dumps([name, *told(f)]), file=file, flush=True)
            torch.__future__.set_swap_module_params_on_conversion(False)
            torch.__future__.set_overwrite_module_params_on_conversion(False)

@pytest.fixture(scope='module')
def ends(tmp_path_factory):
    path = tmp_path_factory.mktemp('moves')/'ends'
    run_code('import sys,test_live_moves; test_live_moves.run_all(sys.argv[1])', path)
    return {name:rest for name,*rest in map(json.loads, path.read_text().splitlines())}

# Errors that say what to write, or are torch's for all tensors of a kind
errors = dict(type_of_module='must be one of bool', load_state_dict_assign='pass assign=False', map_='not supported for tensor subclasses', traced="can't follow live weights",
    new_parameter='call remove|store_dense', set_data_of_another_shape="can't become one of", set_='.', storage_of_a_view='invalid python storage',
    from_dlpack='no memory to share', numpy_from_dlpack='no memory to share')
no_memory = 'C++ reads memory that a tensor without a storage of its own does not have; torch asks no Python here'
fails = dict.fromkeys('to_dlpack set_data_of_another'.split(), no_memory)
fails['storage_is_filled'] = 'a storage is that of a dense copy, so that files can be written'

@pytest.mark.parametrize('name', [pytest.param(n, marks=pytest.mark.xfail(strict=True, reason=fails[n]) if n in fails else ()) for n in [*dangerous,*cases]])
def test_a_live_weight_moves(name, ends):
    "Right, or one error; the index fits, and the model computes and trains on"
    assert name in ends, 'a case before this one crashed'
    end,then = ends[name]
    assert end=='right' or name in errors and re.search(errors[name], end) and not end.startswith(('wrong','crash'))
    assert then=='fits' or name in errors and re.search(errors[name], then)

@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason='no CUDA device')
def test_pinned_memory():
    m = net()
    y = out(m)
    assert mat(m).data.pin_memory().is_pinned()
    close(dense_of(mat(m).data.pin_memory()), dense_of(mat(m)))
    whole(m, y)

@pytest.mark.parametrize('make,product', [(lambda: nn.Linear(16, 8, bias=False), lambda w: F.linear(torch.eye(16), w).t()),
    (lambda: nn.Conv2d(4, 8, 2, bias=False), lambda w: F.conv2d(torch.eye(16).view(16, 4, 2, 2), w).view(16, 8).t())], ids=['linear','conv'])
def test_a_product_reads_values_and_index_of_the_same_moment(make, product, monkeypatch):
    "Another thread may move connections at any time, as here between two lines. The weight at a place is its number, so the values of another index show"
    layer = make()
    sparsify_model(layer, .75, seed=0)
    numbers = torch.arange(1., 129).view(layer.weight.shape)
    with torch.no_grad(): layer.weight.copy_(numbers*layer.weight_mask)
    store_live(weight := masked_params(layer)[0])
    apply,opt = products.Values.apply,torch.optim.SGD(layer.parameters(), lr=.1)
    def late(*args):
        gone,new = [mask.view(-1).nonzero().view(-1)[:8] for mask in (layer.weight_mask, ~layer.weight_mask)]
        with torch.no_grad(): weight.put(gone, new, opt, numbers)
        return apply(*args)
    before = layer.weight.cell.dense().clone()
    monkeypatch.setattr(products.Values, 'apply', late)
    with torch.no_grad(): y = product(layer.weight)
    assert y.reshape(8, -1).equal(before.view(8, -1)) and not layer.weight.cell.dense().equal(before)
    assert layer.weight.cell.dense().equal(numbers*layer.weight_mask)

def trained_beside_forwards(live, others):
    "The state of a network after 60 steps and 30 updates; with `others`, another thread makes forwards in training mode all the while"
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    sparsify_model(m, .9, seed=0)
    opt,done,errors,x = torch.optim.AdamW(m.parameters(), 1e-2),threading.Event(),[],torch.randn(32, 64)
    DynamicSparseTraining(m, opt, 61, method='rigl', seed=0, batches_per_update=2, grow_init_f=.01, sparse_compute={'2.weight':'rows'} if live else False)
    def forwards():
        while not done.is_set():
            try:
                with torch.no_grad(): m(x)
            except Exception as e: errors.append(e)
    thread = threading.Thread(target=forwards)
    if others: thread.start()
    for _ in range(60):
        m(x).square().mean().backward()
        opt.step()
        opt.zero_grad()
    done.set()
    if others: thread.join()
    assert not errors
    return [t+0 for t in m.state_dict().values()]

@pytest.mark.parametrize('live,compiled', [(False,True), (True,True), (False,False)])
def test_a_forward_in_another_thread_changes_nothing(live, compiled, monkeypatch):
    "It projects weights while they are stepped, moved and differentiated: no step is lost, no move made twice, and no hook taken from under a backward"
    if not compiled: monkeypatch.setattr('fastsparse.live.projection._kernel_for', lambda size: None)  # as without Numba
    old = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try: assert all(a.equal(b) for a,b in zip(trained_beside_forwards(live, True), trained_beside_forwards(live, False)))
    finally: sys.setswitchinterval(old)
