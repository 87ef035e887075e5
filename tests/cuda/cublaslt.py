"""Products by cuBLASLt through ctypes: out[M, N] = x[M, K] w[N, K]^T in bf16, or of E4M3 with a scale for each row and
128 columns of x and for each 128 x 128 of w."""
import ctypes

import torch

R_32F, R_16BF, R_8F_E4M3 = 0, 14, 28  # cudaDataType
COMPUTE_32F = 68
# CublasLtMatmulDescAttributes_t.
TRANSA, TRANSB, A_SCALE, B_SCALE, FAST_ACCUM, A_MODE, B_MODE = 3, 4, 17, 18, 25, 31, 32
VEC128, BLOCK128 = 4, 5  # cublasLtMatmulMatrixScale_t
PREF_WORKSPACE = 1
WORKSPACE = 64 << 20


class Algo(ctypes.Structure):
    _fields_ = [("data", ctypes.c_uint64 * 8)]


class Heuristic(ctypes.Structure):
    _fields_ = [("algo", Algo), ("workspace", ctypes.c_size_t), ("state", ctypes.c_int), ("waves", ctypes.c_float), ("reserved", ctypes.c_int * 4)]


def load():
    torch.zeros(8, 8, device="cuda") @ torch.zeros(8, 8, device="cuda")
    path = next(line.split()[-1] for line in open("/proc/self/maps") if "libcublasLt.so" in line)
    return ctypes.CDLL(path)


class CublasLt:
    def __init__(self):
        self.lib, self.handle = load(), ctypes.c_void_p()
        self.lib.cublasLtGetVersion.restype = ctypes.c_size_t
        self.version = self.lib.cublasLtGetVersion()
        self.check(self.lib.cublasLtCreate(ctypes.byref(self.handle)))
        self.workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device="cuda")

    def check(self, code):
        if code:
            raise RuntimeError(f"cuBLASLt status {code}")


class Product:
    """One shape: descriptors, and the algorithms that the heuristics name."""

    def __init__(self, lt, m, n, k, fp8, out_f32, algos=8, a_mode=BLOCK128):
        self.lt, self.fp8 = lt, fp8
        kind, out = (R_8F_E4M3 if fp8 else R_16BF), (R_32F if out_f32 else R_16BF)
        self.desc = ctypes.c_void_p()
        lt.check(lt.lib.cublasLtMatmulDescCreate(ctypes.byref(self.desc), COMPUTE_32F, R_32F))
        self.set(TRANSA, ctypes.c_int32(1))
        self.set(TRANSB, ctypes.c_int32(0))
        if fp8:
            self.set(A_MODE, ctypes.c_int32(a_mode))
            self.set(B_MODE, ctypes.c_int32(VEC128))
            for pointer in (A_SCALE, B_SCALE):
                self.set(pointer, ctypes.c_void_p(lt.workspace.data_ptr()))
        self.a, self.b, self.d = (self.layout(*sides) for sides in ((kind, k, n, k), (kind, k, m, k), (out, n, m, n)))
        preference, found = ctypes.c_void_p(), ctypes.c_int()
        lt.check(lt.lib.cublasLtMatmulPreferenceCreate(ctypes.byref(preference)))
        size = ctypes.c_size_t(WORKSPACE)
        lt.check(lt.lib.cublasLtMatmulPreferenceSetAttribute(preference, PREF_WORKSPACE, ctypes.byref(size), ctypes.c_size_t(8)))
        self.results = (Heuristic * algos)()
        lt.check(lt.lib.cublasLtMatmulAlgoGetHeuristic(lt.handle, self.desc, self.a, self.b, self.d, self.d, preference, algos, self.results, ctypes.byref(found)))
        self.count = found.value

    def set(self, attribute, value):
        self.lt.check(self.lt.lib.cublasLtMatmulDescSetAttribute(self.desc, attribute, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value))))

    def layout(self, kind, rows, columns, ld):
        layout = ctypes.c_void_p()
        self.lt.check(self.lt.lib.cublasLtMatrixLayoutCreate(ctypes.byref(layout), kind, ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(ld)))
        return layout

    def __call__(self, w, x, out, w_scale=None, x_scale=None, algo=0):
        if self.fp8:
            self.set(A_SCALE, ctypes.c_void_p(w_scale.data_ptr()))
            self.set(B_SCALE, ctypes.c_void_p(x_scale.data_ptr()))
        one, zero = ctypes.c_float(1), ctypes.c_float(0)
        p = lambda t: ctypes.c_void_p(t.data_ptr())
        self.lt.check(self.lt.lib.cublasLtMatmul(
            self.lt.handle, self.desc, ctypes.byref(one), p(w), self.a, p(x), self.b, ctypes.byref(zero), p(out), self.d, p(out), self.d,
            ctypes.byref(self.results[algo].algo), p(self.lt.workspace), ctypes.c_size_t(WORKSPACE), ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)))
