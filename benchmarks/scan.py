import sys, torch, collections, itertools, os, time
import multiprocessing as mp
def setup():
    import coupling
    return coupling
def timed(f, names, n=3):
    from torch.profiler import profile, ProfilerActivity
    f(); torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as p:
        for _ in range(n): f()
        torch.cuda.synchronize()
    return sum(e.device_time for e in p.events() if e.device_type==torch.autograd.DeviceType.CUDA and any(s in e.name for s in names))/n
def configs(direction, T):
    if direction=="forward":
        for b,w,s,r in itertools.product((32,64,128),(4,8),(1,2,3),(None,96,128)):
            if (b,w) in ((32,8),): continue
            yield dict(block=b,warps=w,stages=s,registers=r)
    else:
        for b,w,s,p in itertools.product((32,64,128),(4,8),(1,2),(1,2)):
            yield dict(block=b,warps=w,stages=s,parts=p)
def work(job):
    name, direction, c, programs, only_compile = job
    import qklab.ops.coupling.triton as T
    cp=setup()
    usual=T.launch
    how=T.Launch(programs=programs, **c)
    T.launch=lambda d,*a: how if d==direction else usual(d,*a)
    try:
        op=cp.Op(512, 64, 8 if only_compile else 64, 1024, cp.COUPLED[name])
        if direction=="forward":
            with torch.no_grad():
                f=lambda: op.forward("triton")
                if only_compile: f(); torch.cuda.synchronize(); return None
                return timed(f, ("forced_forward","affine_forward"))
        out=op.forward("triton")
        f=lambda: torch.autograd.grad(out, op.leaves(), (op.dq, op.dk), retain_graph=True)
        if only_compile: f(); torch.cuda.synchronize(); return None
        return timed(f, ("forced_backward","affine_backward"))
    except Exception as e:
        return f"{type(e).__name__}"
    finally:
        T.launch=usual
def main():
    began=time.time(); limit=float(sys.argv[1])
    names=sys.argv[2:]
    import qklab.ops.coupling.triton as T
    jobs=[(n,d,c,2,True) for n in names for d in ("forward","backward") for c in configs(d,T)]
    with mp.get_context("spawn").Pool(14) as pool:
        r=pool.map_async(work, jobs, chunksize=2)
        try: r.get(timeout=limit)
        except mp.TimeoutError: print("compile timeout")
        pool.terminate()
    print("compiled", round(time.time()-began,1), flush=True)
    for n in names:
        for d in ("forward","backward"):
            res=[]
            for c in configs(d,T):
                for programs in ((2,4,8) if d=="forward" else (1,2,4)):
                    if time.time()-began>2*limit: break
                    t=work((n,d,c,programs,False))
                    res.append((t if isinstance(t,float) else 1e9, programs, tuple(c.items()), t if not isinstance(t,float) else ""))
            res.sort(key=lambda x:x[0])
            print(n,d,len(res), *[(round(r[0]), r[1], [v for _,v in r[2]]) for r in res[:7]], "errors", collections.Counter(r[3] for r in res if r[3]), flush=True)
if __name__=="__main__": main()
