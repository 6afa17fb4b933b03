import sys, torch, collections
sys.argv=["x"]
from coupling import COUPLED, Op, BF16
import coupling
from torch.profiler import profile, ProfilerActivity
def kernels(f, n=5):
    f(); f(); torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as p:
        for _ in range(n): f()
        torch.cuda.synchronize()
    t=collections.Counter(); c=collections.Counter()
    for e in p.events():
        if e.device_type==torch.autograd.DeviceType.CUDA: t[e.name[:60]]+=e.device_time; c[e.name[:60]]+=1
    return [(k, round(v/n,1), c[k]//n) for k,v in t.most_common(6)]
a=torch.empty(2**27,device="cuda",dtype=torch.bfloat16); b=torch.empty_like(a)
print("copy", kernels(lambda: b.copy_(a)), "268 MB each way")
for name, ch in COUPLED.items():
    for D in (64,128):
        try:
            op=Op(512, D, 64, 1024, ch)
            for impl in ("triton","reference"):
                with torch.no_grad(): f=kernels(lambda: op.forward(impl))
                out=op.forward(impl)
                bk=kernels(lambda: torch.autograd.grad(out, op.leaves(), (op.dq, op.dk), retain_graph=True))
                print(name, D, impl, "fwd", round(sum(x[1] for x in f)), f[:2] if impl=="triton" else "", "bwd", round(sum(x[1] for x in bk)), bk[:4] if impl=="triton" else "", flush=True)
        except Exception as e:
            print(name, D, "ERR", type(e).__name__, str(e)[-200:].replace("\n"," "), flush=True)
