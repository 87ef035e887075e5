//! The packed weights of the experts on this rank.

use candle_core::{DType, Device, Result, Tensor};
use moe_kernels::plan::{EpilogueCall, QuantWeights};
use moe_kernels::{
    Activation, ActivationFormat, CpuIsa, ExpertsSpec, QuantScheme, RoutingMethod, TensorView, Weight,
};

use crate::error::refuse;

/// Sizes and dtype of a set of local experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ExpertsShape {
    /// Number of experts on this rank, E_local; 0 is allowed.
    pub num_local_experts: usize,
    /// Hidden size H.
    pub hidden_size: usize,
    /// Intermediate size I on this rank.
    pub intermediate_size: usize,
    /// Dtype of weights and activations: f32, bf16 or f16.
    pub dtype: DType,
}

/// Packed expert weights.
///
/// | pack | shape | rows |
/// |---|---|---|
/// | `w13` | [E_local, 2I, H] | gate rows, then up rows |
/// | `w2` | [E_local, H, I] | down rows |
/// | `w13_bias` | [E_local, 2I] | optional |
/// | `w2_bias` | [E_local, H] | optional |
///
/// All are contiguous, of one dtype (f32, bf16, f16) and on one device; or both packs are quantised. Cloning
/// shares the data.
#[derive(Clone, Debug)]
pub struct ExpertWeights {
    w13: Weight,
    w2: Weight,
    w13_bias: Option<Tensor>,
    w2_bias: Option<Tensor>,
    shape: ExpertsShape,
    /// How the checkpoint stores the weights.
    scheme: QuantScheme,
}

impl ExpertWeights {
    /// Makes weights from packs. The table in the type's documentation has their shapes.
    ///
    /// # Errors
    /// A wrong rank or wrong dims (the error has the expected ones), an odd number of w13 rows, a size of zero, a pack
    /// that is not contiguous, another dtype or device than w13 has.
    pub fn new(w13: Tensor, w2: Tensor, w13_bias: Option<Tensor>, w2_bias: Option<Tensor>) -> Result<Self> {
        let &[num_local_experts, rows, hidden_size] = w13.dims() else {
            refuse!(Weights, "expert weights: expected w13 [E_local, 2I, H], got {:?}", w13.dims())
        };
        if !rows.is_multiple_of(2) {
            refuse!(
                Weights,
                "expert weights: expected w13 with an even number of rows (gate, then up), got {rows}"
            )
        }
        let intermediate_size = rows / 2;
        if hidden_size == 0 || intermediate_size == 0 {
            refuse!(Weights, "expert weights: expected H and I of at least 1, got w13 {:?}", w13.dims())
        }
        let dtype = w13.dtype();
        if !matches!(dtype, DType::F32 | DType::BF16 | DType::F16) {
            refuse!(Weights, "expert weights: expected w13 of dtype f32, bf16 or f16, got {}", dtype.as_str())
        }
        let shape = ExpertsShape { num_local_experts, hidden_size, intermediate_size, dtype };
        check_pack("w13", &w13, &w13, &[num_local_experts, rows, hidden_size])?;
        check_pack("w2", &w2, &w13, &[num_local_experts, hidden_size, intermediate_size])?;
        let w13 = Weight::new(w13)?;
        let w2 = Weight::new(w2)?;
        let packs = Self { w13, w2, w13_bias: None, w2_bias: None, shape, scheme: QuantScheme::NONE };
        packs.with_biases(w13_bias, w2_bias)
    }

    /// Returns the same packs with these biases instead of their own. The table in the type's documentation has their
    /// shapes.
    ///
    /// # Errors
    /// Wrong dims, another dtype or device than the packs.
    pub fn with_biases(self, w13_bias: Option<Tensor>, w2_bias: Option<Tensor>) -> Result<Self> {
        let ExpertsShape { num_local_experts: e, hidden_size: h, intermediate_size: i, .. } = self.shape;
        for (name, bias, rows) in [("w13_bias", &w13_bias, 2 * i), ("w2_bias", &w2_bias, h)] {
            if let Some(bias) = bias {
                check_like(name, bias, self.device(), self.shape.dtype, &[e, rows])?;
            }
        }
        Ok(Self { w13_bias, w2_bias, ..self })
    }

    /// Quantised packs, without biases ([`with_biases`](Self::with_biases) adds them): `w13` [E_local, 2I, H] packed
    /// for gate and up, `w2` [E_local, H, I] for a row-parallel product.
    ///
    /// # Errors
    /// Dims, dtypes or schemes that do not fit together; floats.
    pub fn quantised(w13: Weight, w2: Weight) -> Result<Self> {
        let w13 = w13.with_experts()?;
        let w2 = w2.with_experts()?;
        let (&[e, rows, h], &[experts, out, i]) = (w13.dims(), w2.dims()) else {
            refuse!(
                Weights,
                "expert weights: expected packs [E_local, 2I, H] and [E_local, H, I], got {:?} and {:?}",
                w13.dims(),
                w2.dims()
            )
        };
        if (e, h, rows) != (experts, out, 2 * i) || w13.dtype() != w2.dtype() {
            refuse!(
                Weights,
                "expert weights: expected w13 [E_local, 2I, H] and w2 [E_local, H, I] for one dtype, got {:?} for {} and {:?} for {}",
                w13.dims(),
                w13.dtype().as_str(),
                w2.dims(),
                w2.dtype().as_str()
            )
        }
        let scheme = w13.scheme();
        if scheme == QuantScheme::NONE || w2.scheme() == QuantScheme::NONE {
            refuse!(
                Weights,
                "expert weights: expected quantised packs, got w13 {scheme} and w2 {}",
                w2.scheme()
            )
        }
        let shape =
            ExpertsShape { num_local_experts: e, hidden_size: h, intermediate_size: i, dtype: w13.dtype() };
        Ok(Self { w13, w2, w13_bias: None, w2_bias: None, shape, scheme })
    }

    /// Declares that the checkpoint stores these floats quantised in this scheme. Only a backend that emulates accepts
    /// them.
    #[must_use]
    pub fn emulating(self, scheme: QuantScheme) -> Self {
        Self { scheme, ..self }
    }

    /// Returns the packs as floats in rows. They are copied if they are quantised.
    ///
    /// # Errors
    /// No memory is left.
    pub fn dequantised(self) -> Result<Self> {
        if self.w13.scheme() == QuantScheme::NONE && self.w2.scheme() == QuantScheme::NONE {
            return Ok(Self { scheme: QuantScheme::NONE, ..self });
        }
        Self::new(self.w13.to_tensor()?, self.w2.to_tensor()?, self.w13_bias, self.w2_bias)
    }

    /// How w13 and w2 are quantised, for the choice of kernels; `None` means floats.
    pub fn quantisation(&self) -> Option<[QuantWeights; 2]> {
        Some([self.w13.quantisation()?, self.w2.quantisation()?])
    }

    /// How the checkpoint stores the weights.
    pub fn scheme(&self) -> QuantScheme {
        self.scheme
    }

    /// Returns the same packs in the order that a code path of the CPU reads best, see [`Weight::packed`].
    ///
    /// # Errors
    /// No memory is left.
    pub fn packed(self, isa: Option<CpuIsa>) -> Result<Self> {
        let width = self.shape.intermediate_size;
        let hidden = self.shape.hidden_size;
        Ok(Self { w13: self.w13.packed(isa, width)?, w2: self.w2.packed(isa, hidden)?, ..self })
    }

    /// Gate and up weights, [E_local, 2I, H].
    pub fn w13(&self) -> &Weight {
        &self.w13
    }

    /// Down weights, [E_local, H, I].
    pub fn w2(&self) -> &Weight {
        &self.w2
    }

    /// Biases of gate and up, [E_local, 2I].
    pub fn w13_bias(&self) -> Option<&Tensor> {
        self.w13_bias.as_ref()
    }

    /// Biases of down, [E_local, H].
    pub fn w2_bias(&self) -> Option<&Tensor> {
        self.w2_bias.as_ref()
    }

    /// Sizes and dtype.
    pub fn shape(&self) -> ExpertsShape {
        self.shape
    }

    /// The biases of gate and up and of down, which the kernels read.
    pub(crate) fn bias_views(&self) -> Result<[Option<TensorView<'_>>; 2]> {
        let w13 = self.w13_bias.as_ref().map(TensorView::new).transpose()?;
        let w2 = self.w2_bias.as_ref().map(TensorView::new).transpose()?;
        Ok([w13, w2])
    }

    /// What these experts compute in addition to their products, for the choice of kernels.
    pub(crate) fn epilogue(&self, activation: Activation) -> EpilogueCall {
        EpilogueCall { bias: self.has_bias(), activation }
    }

    /// Whether there are biases.
    pub fn has_bias(&self) -> bool {
        self.w13_bias.is_some() || self.w2_bias.is_some()
    }

    /// The device of the packs.
    pub fn device(&self) -> &Device {
        self.w13.device()
    }

    /// The number of bytes of all packs.
    pub fn bytes(&self) -> usize {
        let biases = [self.w13_bias.as_ref(), self.w2_bias.as_ref()];
        let biases: usize = biases.into_iter().flatten().map(Tensor::elem_count).sum();
        self.w13.bytes() + self.w2.bytes() + biases * self.shape.dtype.size_in_bytes()
    }

    /// The specification of these experts on one rank: every expert local, rows in the Standard
    /// format, any routing method. Change fields as needed before asking [`select`](crate::select).
    pub fn spec(&self, activation: Activation, top_k: usize) -> ExpertsSpec {
        ExpertsSpec {
            num_experts: self.shape.num_local_experts,
            num_local_experts: self.shape.num_local_experts,
            top_k,
            hidden_size: self.shape.hidden_size,
            intermediate_size: self.shape.intermediate_size,
            dtype: self.shape.dtype,
            quant: self.scheme,
            activation,
            has_bias: self.has_bias(),
            activation_format: ActivationFormat::Standard,
            routing: RoutingMethod::Unspecified,
            apply_router_weight_on_input: false,
            tp_size: 1,
            ep_size: 1,
            batch_invariant: false,
            gpu: moe_kernels::gpu_of(self.device()),
        }
    }
}

/// Checks one pack; its dtype and device must be w13's.
fn check_pack(name: &str, pack: &Tensor, w13: &Tensor, dims: &[usize]) -> Result<()> {
    check_like(name, pack, w13.device(), w13.dtype(), dims)
}

/// Checks dims, dtype and device of a pack or of a bias.
fn check_like(name: &str, pack: &Tensor, device: &Device, dtype: DType, dims: &[usize]) -> Result<()> {
    if pack.dims() != dims {
        refuse!(
            Weights,
            "expert weights: expected {name} with dims {dims:?} for this w13, got {:?}",
            pack.dims()
        )
    }
    if pack.dtype() != dtype {
        refuse!(
            Weights,
            "expert weights: expected {name} of dtype {} like w13, got {}",
            dtype.as_str(),
            pack.dtype().as_str()
        )
    }
    if !pack.device().same_device(device) {
        refuse!(
            Weights,
            "expert weights: expected {name} on {:?} like w13, got {:?}",
            device.location(),
            pack.device().location()
        )
    }
    if !pack.is_contiguous() {
        refuse!(
            Weights,
            "expert weights: expected a contiguous {name}, got strides {:?}; call .contiguous()",
            pack.stride()
        )
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn zeros(dims: &[usize]) -> Tensor {
        Tensor::zeros(dims, DType::F32, &Device::Cpu).unwrap()
    }

    fn refused(w13: Tensor, w2: Tensor, w13_bias: Option<Tensor>, w2_bias: Option<Tensor>) -> String {
        ExpertWeights::new(w13, w2, w13_bias, w2_bias).unwrap_err().to_string()
    }

    #[test]
    fn shapes_are_read_from_the_packs() -> Result<()> {
        let b13 = zeros(&[3, 8]);
        let b2 = zeros(&[3, 5]);
        let w = ExpertWeights::new(zeros(&[3, 8, 5]), zeros(&[3, 5, 4]), Some(b13), Some(b2))?;
        let want =
            ExpertsShape { num_local_experts: 3, hidden_size: 5, intermediate_size: 4, dtype: DType::F32 };
        assert_eq!(w.shape(), want);
        assert_eq!(w.bytes(), 4 * (3 * 8 * 5 + 3 * 5 * 4 + 3 * 8 + 3 * 5));
        assert!(w.has_bias());
        let none = ExpertWeights::new(zeros(&[0, 8, 5]), zeros(&[0, 5, 4]), None, None)?;
        assert_eq!((none.shape().num_local_experts, none.bytes()), (0, 0));
        Ok(())
    }

    #[test]
    fn wrong_packs_are_refused_with_expected_and_got() -> Result<()> {
        let w13 = || zeros(&[3, 8, 5]);
        let w2 = || zeros(&[3, 5, 4]);
        let f16 = |t: Tensor| t.to_dtype(DType::F16).unwrap();
        for (got, want) in [
            (refused(zeros(&[8, 5]), w2(), None, None), "expected w13 [E_local, 2I, H], got [8, 5]"),
            (refused(zeros(&[3, 7, 5]), w2(), None, None), "even number of rows (gate, then up), got 7"),
            (refused(zeros(&[3, 0, 5]), w2(), None, None), "H and I of at least 1, got w13 [3, 0, 5]"),
            (
                refused(w13(), zeros(&[3, 4, 5]), None, None),
                "expected w2 with dims [3, 5, 4] for this w13, got [3, 4, 5]",
            ),
            (refused(w13(), zeros(&[2, 5, 4]), None, None), "expected w2 with dims [3, 5, 4]"),
            (refused(w13(), w2(), Some(zeros(&[3, 4])), None), "expected w13_bias with dims [3, 8]"),
            (refused(w13(), w2(), None, Some(zeros(&[3, 4]))), "expected w2_bias with dims [3, 5]"),
            (refused(w13(), f16(w2()), None, None), "expected w2 of dtype f32 like w13, got f16"),
            (refused(w13().to_dtype(DType::F64)?, w2(), None, None), "f32, bf16 or f16, got f64"),
            (refused(zeros(&[3, 5, 8]).transpose(1, 2)?, w2(), None, None), "expected a contiguous w13"),
        ] {
            assert!(got.contains(want), "{got}");
        }
        Ok(())
    }
}
