//! The inputs of a call: sizes, device, dtype and layout in memory.

use std::cell::Cell;
use std::collections::HashMap;

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::VarBuilder;

/// The order of the elements of an input in memory. The values are the same.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Layout {
    /// Row-major.
    Contiguous,
    /// Row-major, beginning one row into an allocation.
    Rows,
    /// The last two dimensions swapped in memory.
    Transposed,
    /// A range of columns of wider rows.
    Columns,
}

/// All layouts.
pub const LAYOUTS: [Layout; 4] = [Layout::Contiguous, Layout::Rows, Layout::Transposed, Layout::Columns];

impl Layout {
    /// The same tensor in this layout.
    fn of(self, x: &Tensor) -> Result<Tensor> {
        let last = x.rank() - 1;
        match self {
            _ if x.elem_count() == 0 => Ok(x.clone()),
            Self::Contiguous => Ok(x.clone()),
            Self::Rows => Tensor::cat(&[&x.narrow(0, 0, 1)?, x], 0)?.narrow(0, 1, x.dim(0)?),
            Self::Transposed if last == 0 => {
                let column = x.unsqueeze(1)?;
                Tensor::cat(&[&column, &column], 1)?.narrow(1, 1, 1)?.squeeze(1)
            }
            Self::Transposed => x.transpose(last - 1, last)?.contiguous()?.transpose(last - 1, last),
            Self::Columns => {
                let edge = x.narrow(last, 0, 1)?;
                Tensor::cat(&[&edge, x, &edge], last)?.narrow(last, 1, x.dim(last)?)
            }
        }
    }
}

/// Sizes of a case's layer.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Leading dimensions of the token rows: [B, S] or `[T]`.
    pub tokens: &'static [usize],
    /// Hidden size.
    pub hidden: usize,
    /// Intermediate size of an expert.
    pub inter: usize,
    /// Experts.
    pub experts: usize,
    /// Experts of a token.
    pub top_k: usize,
}

impl Sizes {
    /// Rows.
    pub fn rows(&self) -> usize {
        self.tokens.iter().product()
    }

    /// Dimensions of the token rows.
    pub fn dims(&self) -> Vec<usize> {
        [self.tokens, &[self.hidden]].concat()
    }
}

/// Where and on what a call is made.
pub struct Case {
    /// The device of the tensors.
    pub device: Device,
    /// The model dtype.
    pub dtype: DType,
    /// The order of the elements of inputs in memory; weights are contiguous.
    pub layout: Layout,
    /// The layer's sizes.
    pub sizes: Sizes,
    variables: Variables,
    seed: Cell<u64>,
    made_variables: Cell<bool>,
}

/// Which tensors of a case are variables.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Variables {
    /// None.
    None,
    /// Inputs.
    Inputs,
    /// Weights.
    Weights,
    /// Both, but detached: none counts.
    Detached,
}

impl Case {
    /// A case; two with equal dtypes and sizes have the same numbers.
    pub fn new(device: &Device, dtype: DType, layout: Layout, sizes: Sizes) -> Self {
        Self {
            device: device.clone(),
            dtype,
            layout,
            sizes,
            variables: Variables::None,
            seed: Cell::new(0x5eed),
            made_variables: Cell::new(false),
        }
    }

    /// Returns the same case with variables, for which candle computes gradients.
    pub fn with(self, variables: Variables) -> Self {
        Self { variables, ..self }
    }

    /// Returns whether any tensor of this case was made a variable.
    pub fn made_variables(&self) -> bool {
        self.made_variables.get()
    }

    /// Returns a float tensor as a variable if this case makes variables of tensors of this kind. Other tensors are
    /// returned unchanged.
    fn variable(&self, x: Tensor, kind: Variables) -> Result<Tensor> {
        if !matches!(self.variables, v if v == kind || v == Variables::Detached) || !x.dtype().is_float() {
            return Ok(x);
        }
        let variable = Var::from_tensor(&x)?;
        if self.variables == Variables::Detached {
            return Ok(variable.as_detached_tensor());
        }
        self.made_variables.set(true);
        Ok(variable.into_inner())
    }

    /// The next random number in -1..1.
    fn random(&self) -> f32 {
        let next = self.seed.get().wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        self.seed.set(next);
        (next >> 40) as f32 / (1 << 23) as f32 - 1.
    }

    fn place(&self, host: Vec<f32>, dims: &[usize], dtype: DType) -> Result<Tensor> {
        if host.is_empty() {
            // candle cannot allocate an empty tensor on a CUDA device, but it can take no rows of a larger tensor.
            let some: Vec<usize> = dims.iter().map(|&d| d.max(1)).collect();
            let some = Tensor::zeros(some, dtype, &self.device)?;
            return (0..dims.len()).try_fold(some, |t, axis| t.narrow(axis, 0, dims[axis]));
        }
        Tensor::from_vec(host, dims, &Device::Cpu)?.to_dtype(dtype)?.to_device(&self.device)
    }

    /// A weight of this case's dtype with entries below `scale`, contiguous.
    pub fn weight(&self, dims: &[usize], scale: f32) -> Result<Tensor> {
        let n = dims.iter().product();
        let weight = self.place((0..n).map(|_| self.random() * scale).collect(), dims, self.dtype)?;
        self.variable(weight, Variables::Weights)
    }

    /// An input of numbers in -1..1.
    pub fn input(&self, dims: &[usize], dtype: DType) -> Result<Tensor> {
        let n = dims.iter().product();
        let input = self.place((0..n).map(|_| self.random()).collect(), dims, dtype)?;
        self.layout.of(&self.variable(input, Variables::Inputs)?)
    }

    /// Token rows [.., H].
    pub fn hidden(&self) -> Result<Tensor> {
        self.input(&self.sizes.dims(), self.dtype)
    }

    /// An input of u32.
    pub fn words(&self, words: Vec<u32>, dims: &[usize]) -> Result<Tensor> {
        if words.is_empty() {
            return self.place(Vec::new(), dims, DType::U32);
        }
        self.layout.of(&Tensor::from_vec(words, dims, &self.device)?)
    }

    /// Distinct expert ids [T, K], and weights that add up to 1 or less.
    pub fn routing(&self) -> Result<(Tensor, Tensor)> {
        let Sizes { experts, top_k, .. } = self.sizes;
        let dims = [self.sizes.rows(), top_k];
        let id = |i: usize| (((i / top_k) * 3 + i % top_k) % experts) as u32;
        let ids = self.words((0..dims[0] * dims[1]).map(id).collect(), &dims)?;
        let weights = (self.input(&dims, DType::F32)?.abs()? / top_k as f64)?;
        Ok((ids, weights))
    }

    /// Weights by their names in a checkpoint.
    pub fn checkpoint(&self, tensors: &[(String, Vec<usize>, f32)]) -> Result<VarBuilder<'static>> {
        let entries =
            tensors.iter().map(|(name, dims, scale)| Ok((name.clone(), self.weight(dims, *scale)?)));
        let entries: HashMap<String, Tensor> = entries.collect::<Result<_>>()?;
        Ok(VarBuilder::from_tensors(entries, self.dtype, &self.device))
    }
}

/// A call: its results, in order.
pub type Call = fn(&Case) -> Result<Vec<Tensor>>;
