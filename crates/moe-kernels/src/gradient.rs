//! Makes `backward()` through the results of calls on tensors an error, instead of silently wrong.
//!
//! These crates run models and do not train them, so their operations have no gradient. candle would not notice: it
//! would treat the results of a call as constants, and `backward()` would leave out the variables on which they depend.
//! So a call on tensors records which tensors it reads, its inputs and the weights of its module (`reads`). If candle
//! tracks the gradient of one of them, each result that could have a gradient becomes the result of an operation whose
//! backward pass is an error. Without a variable nothing is added, and detached tensors work as usual.

use std::cell::Cell;

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp1, DType, Layout, Result, Shape, Storage, Tensor, Var, bail};
use parking_lot::Mutex;

/// What the running call on this thread has read. Calls may contain other calls.
#[derive(Clone, Copy, PartialEq)]
enum Watch {
    /// No call on tensors runs.
    Off,
    /// A call runs, and has read only constants so far.
    Constants,
    /// A call runs, and has read a tensor that depends on a variable.
    Variables,
}

thread_local! {
    static WATCH: Cell<Watch> = const { Cell::new(Watch::Off) };
}

/// The result of a call on tensors, whose tensors can be replaced.
pub trait TensorResults: Sized {
    /// The results with `f` applied to each tensor that can have a gradient.
    ///
    /// # Errors
    /// Any error of `f`.
    fn map_tensors(self, f: impl Fn(Tensor) -> Result<Tensor>) -> Result<Self>;
}

impl TensorResults for () {
    fn map_tensors(self, _: impl Fn(Tensor) -> Result<Tensor>) -> Result<Self> {
        Ok(())
    }
}

impl TensorResults for Tensor {
    fn map_tensors(self, f: impl Fn(Tensor) -> Result<Tensor>) -> Result<Self> {
        f(self)
    }
}

impl TensorResults for (Tensor, Tensor) {
    fn map_tensors(self, f: impl Fn(Tensor) -> Result<Tensor>) -> Result<Self> {
        Ok((f(self.0)?, f(self.1)?))
    }
}

/// Restores the state of the surrounding call. Reads of the inner call count for the outer call, too.
struct Restore(Watch);

impl Drop for Restore {
    fn drop(&mut self) {
        let outer = match (self.0, WATCH.get()) {
            (Watch::Constants, Watch::Variables) => Watch::Variables,
            (outer, _) => outer,
        };
        WATCH.set(outer);
    }
}

/// Runs a call on tensors. If it reads a tensor that depends on a variable, `backward()` through its results fails.
pub(crate) fn watched<R: TensorResults>(call: impl FnOnce() -> Result<R>) -> Result<R> {
    let _outer = Restore(WATCH.replace(Watch::Constants));
    let results = call()?;
    match WATCH.get() {
        Watch::Variables => results.map_tensors(without_gradient),
        Watch::Off | Watch::Constants => Ok(results),
    }
}

/// Notes that the running call reads a tensor.
pub(crate) fn reads(tensor: &Tensor) {
    if WATCH.get() == Watch::Constants && has_variable(tensor) {
        WATCH.set(Watch::Variables);
    }
}

/// Whether candle would compute a gradient through this tensor: it is a variable or depends on one.
pub fn has_variable(tensor: &Tensor) -> bool {
    tensor.dtype().is_float() && !tensor.sorted_nodes().is_empty()
}

/// Marks `copy`, which was made of the values of one or several tensors. `has_variable` says whether one of them
/// depends on a variable; then `backward()` through the copy fails.
///
/// # Errors
/// No memory left.
pub fn copy_of(has_variable: bool, copy: Tensor) -> Result<Tensor> {
    if has_variable { without_gradient(copy) } else { Ok(copy) }
}

/// The same values as the result of an operation without a backward pass.
fn without_gradient(tensor: Tensor) -> Result<Tensor> {
    if !tensor.dtype().is_float() || tensor.elem_count() == 0 {
        return Ok(tensor);
    }
    // candle keeps an operation only if its argument depends on a variable.
    let variable = Var::zeros((), DType::F32, tensor.device())?;
    let values = Mutex::new(Some(tensor.force_contiguous()?));
    variable.apply_op1(NoGradient { values })
}

/// An operation that returns these values, whatever its argument is.
struct NoGradient {
    values: Mutex<Option<Tensor>>,
}

impl NoGradient {
    fn take<S>(&self, of: impl Fn(&Storage, &Layout) -> Option<Result<S>>) -> Result<(S, Shape)> {
        let Some(values) = self.values.lock().take() else { bail!("{}: run twice", self.name()) };
        let (storage, layout) = values.storage_and_layout();
        match of(&storage, layout) {
            Some(copy) => Ok((copy?, layout.shape().clone())),
            None => bail!("{}: values on {:?}", self.name(), storage.device().location()),
        }
    }
}

impl CustomOp1 for NoGradient {
    fn name(&self) -> &'static str {
        "no gradient"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        self.take(|storage, layout| match storage {
            Storage::Cpu(values) => Some(values.try_clone(layout)),
            _ => None,
        })
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        _: &candle_core::CudaStorage,
        _: &Layout,
    ) -> Result<(candle_core::CudaStorage, Shape)> {
        self.take(|storage, layout| match storage {
            Storage::Cuda(values) => Some(values.try_clone(layout)),
            _ => None,
        })
    }

    fn bwd(&self, _: &Tensor, res: &Tensor, _: &Tensor) -> Result<Option<Tensor>> {
        bail!(
            "backward: a tensor {:?} comes from an operation of the moe crates, which have no gradient: they run models and \
             do not train them. Pass `detach()`ed inputs and weights, or train with candle's own operations",
            res.dims()
        )
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;
    use crate::Weight;
    use crate::tensor::with_tensors;

    /// The first tensor, read as every call reads its inputs.
    fn call(tensors: [&Tensor; 2]) -> Result<Tensor> {
        with_tensors(tensors, [], |[x, _], [], ex| {
            let mut out = ex.output(x.dtype(), x.dims())?;
            ex.copy(x, out.view_mut())?;
            out.into_tensor()
        })
    }

    fn backward(result: &Tensor) -> std::result::Result<(), String> {
        result.sum_all().and_then(|sum| sum.backward()).map(drop).map_err(|e| e.to_string())
    }

    #[test]
    fn backward_through_a_call_fails_where_a_variable_is_behind_it() -> Result<()> {
        let constant = Tensor::new(&[1f32, 2.], &Device::Cpu)?;
        let variable = Var::from_tensor(&constant)?;
        let made = (variable.as_tensor() * 2.)?;
        assert_eq!(backward(&call([&constant, &constant])?), Ok(()));
        let detached = [&variable.as_detached_tensor(), &made.detach()];
        assert_eq!(backward(&call(detached)?), Ok(()));
        for tensors in [[&*variable, &constant], [&constant, &*variable], [&made, &constant]] {
            let result = call(tensors)?;
            assert_eq!(result.to_vec1::<f32>()?, tensors[0].to_vec1::<f32>()?);
            let error = backward(&result).unwrap_err();
            assert!(error.contains("tensor [2]") && error.contains("have no gradient"), "{error}");
        }
        Ok(())
    }

    #[test]
    fn what_a_call_reads_inside_of_another_counts_in_both() -> Result<()> {
        let constant = Tensor::new(&[1f32, 2.], &Device::Cpu)?;
        let variable = Var::from_tensor(&constant)?;
        let outer = with_tensors([&constant], [], |[x], [], ex| {
            call([&constant, &constant])?;
            let inner = call([&constant, &*variable])?;
            assert!(backward(&inner).is_err());
            let mut out = ex.output(x.dtype(), x.dims())?;
            ex.copy(x, out.view_mut())?;
            out.into_tensor()
        })?;
        assert!(backward(&outer).is_err());
        assert_eq!(backward(&call([&constant, &constant])?), Ok(()), "a call leaves nothing");
        Ok(())
    }

    #[test]
    fn packed_and_unpacked_weights_remember_their_variable() -> Result<()> {
        let rows = Var::zeros((32, 32), DType::F32, &Device::Cpu)?;
        let packed = Weight::new(rows.as_tensor().clone())?.packed(Some(crate::CpuIsa::Avx2), 32)?;
        assert!(has_variable(&packed.to_tensor()?));
        let constant = Weight::new(rows.as_detached_tensor())?.packed(Some(crate::CpuIsa::Avx2), 32)?;
        assert!(!has_variable(&constant.to_tensor()?));
        Ok(())
    }
}
