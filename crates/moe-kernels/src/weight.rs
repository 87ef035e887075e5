//! Weights of products, in the order that the kernels of their machine read fastest.
//!
//! A checkpoint stores a matrix by rows. On AVX2 and AVX-512 without matrix registers, the kernels need the same k of
//! 16 rows next to each other. So such a weight is packed once, after loading, into panels of 16 rows
//! ([`WeightOrder::Panels`]). Layers hold a [`Weight`] and pass its [`WeightView`] to an op, which accepts both orders;
//! the order does not change the bits of results. A view of a candle tensor is a weight in rows.
//!
//! A quantised weight ([`QuantStack`]) is a [`Weight`] too. The same ops accept it, and multiply its integers.

#[cfg(feature = "cuda")]
mod device_slot;
mod order;
mod quantised;
mod slot;
mod view;

use std::sync::Arc;

use candle_core::{DType, Device, Result, Tensor, bail};
use parking_lot::RwLock;
use rayon::prelude::*;

use crate::buffer::Buffer;
use crate::cpu::panel::{pack_panel, unpack_row};
use crate::cpu::simd::{LANES, Lanes};
#[cfg(feature = "cuda")]
use crate::cuda::quant::DevicePack;
use crate::element::Float;
use crate::exec::CpuIsa;
use crate::gradient;
use crate::plan::QuantWeights;
use crate::quant::{QuantPacking, QuantStack, QuantUse};
use crate::scheme::QuantScheme;
use crate::tensor::TensorView;
use crate::with_float;
use quantised::{Pack, QuantGuard, Quantised};

pub use order::WeightOrder;
pub use quantised::QuantView;
pub use view::{PanelsView, WeightView};

/// The weight of a product: a matrix [N, K], or a pack of them [E, N, K]. Cloning shares the data.
#[derive(Clone, Debug)]
pub struct Weight(WeightData);

#[derive(Clone, Debug)]
enum WeightData {
    /// Floats in this order. The tensor's rows are the rows of the matrix only if the order is `Rows`.
    Values(Tensor, WeightOrder),
    Quantised(Quantised),
}

impl Weight {
    /// A weight in rows. The tensor is copied if it is not contiguous.
    ///
    /// # Errors
    /// A rank that is not 2 or 3.
    pub fn new(rows: Tensor) -> Result<Self> {
        if !matches!(rows.rank(), 2 | 3) {
            bail!("a weight: expected a matrix [N, K] or a pack [E, N, K], got dims {:?}", rows.dims())
        }
        Ok(Self(WeightData::Values(rows.contiguous()?, WeightOrder::Rows)))
    }

    /// A quantised weight for activations of `dtype` (f32, bf16 or f16). If it is packed for gate and up, its dims are
    /// [E, N, K]. Otherwise one matrix has the dims [N, K], and [`with_experts`](Self::with_experts) makes a pack of
    /// one expert from it.
    ///
    /// # Errors
    /// Another dtype.
    pub fn of_quantised(matrix: impl Into<QuantStack>, dtype: DType) -> Result<Self> {
        Self::of_pack(Pack::Cpu(Arc::new(RwLock::new(matrix.into()))), dtype)
    }

    /// [`of_quantised`](Self::of_quantised) for a pack on a device.
    #[cfg(feature = "cuda")]
    pub(crate) fn of_device_pack(pack: DevicePack, dtype: DType) -> Result<Self> {
        Self::of_pack(Pack::Cuda(Arc::new(pack)), dtype)
    }

    fn of_pack(pack: Pack, dtype: DType) -> Result<Self> {
        if !matches!(dtype, DType::F32 | DType::BF16 | DType::F16) {
            bail!("a quantised weight: expected activations in f32, bf16 or f16, got {}", dtype.as_str())
        }
        let [experts, n, k] = pack.dims();
        let is_pack = experts != 1 || pack.usage() == QuantUse::GateUp;
        let dims = if is_pack { vec![experts, n, k] } else { vec![n, k] };
        Ok(Self(WeightData::Quantised(Quantised { pack, dims, dtype })))
    }

    /// A matrix [N, K] as a pack of one expert, [1, N, K]. A pack stays unchanged.
    ///
    /// # Errors
    /// None for a weight of this type; the errors of reshaping.
    pub fn with_experts(self) -> Result<Self> {
        Ok(Self(match self.0 {
            WeightData::Values(values, order) if values.rank() == 2 => {
                WeightData::Values(values.unsqueeze(0)?, order)
            }
            WeightData::Quantised(mut q) if q.dims.len() == 2 => {
                q.dims.insert(0, 1);
                WeightData::Quantised(q)
            }
            held => held,
        }))
    }

    /// The same weight in the order that an instruction set reads fastest ([`WeightOrder::best`]). With `isa` = `None`,
    /// and for a weight on a device or a quantised one, nothing changes. `run` is the number of rows that products
    /// process together: N, or N / 2 for a pack of gate and up rows. During packing there are two copies of this
    /// weight. The copy in rows is freed at the end, unless the caller holds it too.
    ///
    /// # Errors
    /// No memory left.
    pub fn packed(self, isa: Option<CpuIsa>, run: usize) -> Result<Self> {
        let (Some(isa), WeightData::Values(values, WeightOrder::Rows)) = (isa, &self.0) else {
            return Ok(self);
        };
        let k = self.k();
        let dtype = self.dtype();
        let is_best = WeightOrder::best(isa, dtype, run, k) == WeightOrder::Rows;
        if is_best || values.elem_count() == 0 || !values.device().is_cpu() {
            return Ok(self);
        }
        let mut panels = Buffer::zeros(dtype, values.dims())?;
        with_float!(dtype, "packing a weight", T => {
            let guard = TensorView::new(values)?;
            let rows = guard.view()?;
            let mut panels = panels.view_mut();
            let rows = rows.cpu::<T>()?;
            let panels = panels.cpu_mut::<T>()?;
            let pairs = rows.par_chunks_exact(LANES * k).zip(panels.par_chunks_exact_mut(LANES * k));
            pairs.for_each(|(rows, panel)| pack_panel(rows, panel));
            Ok(())
        })?;
        let panels = gradient::copy_of(gradient::has_variable(values), panels.into_tensor()?)?;
        Ok(Self(WeightData::Values(panels, WeightOrder::Panels)))
    }

    /// [N, K] or [E, N, K].
    pub fn dims(&self) -> &[usize] {
        match &self.0 {
            WeightData::Values(values, _) => values.dims(),
            WeightData::Quantised(q) => &q.dims,
        }
    }

    /// The dtype; for a quantised weight, the dtype of the activations that it is multiplied with.
    pub fn dtype(&self) -> DType {
        match &self.0 {
            WeightData::Values(values, _) => values.dtype(),
            WeightData::Quantised(q) => q.dtype,
        }
    }

    /// The device of its memory.
    pub fn device(&self) -> &Device {
        match &self.0 {
            WeightData::Values(values, _) => values.device(),
            WeightData::Quantised(q) => q.pack.device(),
        }
    }

    /// The order of its values in memory. A quantised weight has its own order.
    pub fn order(&self) -> WeightOrder {
        match &self.0 {
            WeightData::Values(_, order) => *order,
            WeightData::Quantised(_) => WeightOrder::Panels,
        }
    }

    /// Its quantisation.
    pub fn scheme(&self) -> QuantScheme {
        match &self.0 {
            WeightData::Values(..) => QuantScheme::NONE,
            WeightData::Quantised(q) => q.pack.scheme(),
        }
    }

    /// Its quantisation in the form that the choice of kernels uses; `None` for floats.
    pub fn quantisation(&self) -> Option<QuantWeights> {
        match &self.0 {
            WeightData::Values(..) => None,
            WeightData::Quantised(q) => Some(q.pack.weights()),
        }
    }

    /// Whether host or device packed a quantised weight; `None` for floats.
    pub fn packing(&self) -> Option<QuantPacking> {
        match &self.0 {
            WeightData::Values(..) => None,
            WeightData::Quantised(q) => Some(q.pack.packing()),
        }
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        match &self.0 {
            WeightData::Values(values, _) => values.elem_count() * values.dtype().size_in_bytes(),
            WeightData::Quantised(q) => q.pack.bytes(),
        }
    }

    /// Length of a row.
    fn k(&self) -> usize {
        self.dims().last().copied().unwrap_or(0)
    }

    /// The weight as a tensor of its dtype: the weight itself if it is in rows, else a copy.
    ///
    /// # Errors
    /// No memory left.
    pub fn to_tensor(&self) -> Result<Tensor> {
        let (mut rows, k) = match &self.0 {
            WeightData::Values(values, WeightOrder::Rows) => return Ok(values.clone()),
            #[cfg(feature = "cuda")]
            WeightData::Quantised(Quantised { pack: Pack::Cuda(pack), dims, dtype }) => {
                return pack.to_tensor(*dtype)?.reshape(dims.as_slice());
            }
            _ => (Buffer::zeros(self.dtype(), self.dims())?, self.k()),
        };
        with_float!(self.dtype(), "unpacking a weight", T => {
            let mut rows = rows.view_mut();
            let rows = rows.cpu_mut::<T>()?.chunks_exact_mut(k.max(1)).enumerate();
            match &self.0 {
                WeightData::Values(values, _) => {
                    let guard = TensorView::new(values)?;
                    let panels = guard.view()?.cpu::<T>()?;
                    rows.for_each(|(row, out)| panel_row(panels, k, row, out));
                }
                WeightData::Quantised(q) => {
                    let guard = QuantGuard::new(q);
                    let matrix = guard.view().matrix("unpacking a weight")?;
                    let n = matrix.dims()[1].max(1);
                    let mut wide = vec![0.0; k];
                    for (row, out) in rows {
                        matrix.dequantise_into(row / n, row % n, &mut wide)?;
                        out.iter_mut().zip(&wide).for_each(|(out, x)| *out = T::narrow(*x));
                    }
                }
            }
            Ok(())
        })?;
        let has_variable = matches!(&self.0, WeightData::Values(values, _) if gradient::has_variable(values));
        gradient::copy_of(has_variable, rows.into_tensor()?)
    }

    /// The weight under its read guard, so that an op can borrow it.
    ///
    /// # Errors
    /// None for a weight of this type; the errors of [`TensorView::new`].
    pub fn read(&self) -> Result<WeightGuard<'_>> {
        Ok(WeightGuard(match &self.0 {
            WeightData::Values(values, order) => Guarded::Values(TensorView::new(values)?, *order),
            WeightData::Quantised(q) => Guarded::Quantised(QuantGuard::new(q)),
        }))
    }
}

/// Copies row `row` of a matrix in panels.
pub(crate) fn panel_row<T: Lanes>(panels: &[T], k: usize, row: usize, out: &mut [T]) {
    unpack_row(&panels[row / LANES * LANES * k..], k, row, out);
}

/// A [`Weight`] under its read guard.
pub struct WeightGuard<'a>(Guarded<'a>);

enum Guarded<'a> {
    Values(TensorView<'a>, WeightOrder),
    Quantised(QuantGuard<'a>),
}

impl WeightGuard<'_> {
    /// The view that ops take.
    ///
    /// # Errors
    /// A dtype that no view holds.
    pub fn view(&self) -> Result<WeightView<'_>> {
        Ok(match &self.0 {
            Guarded::Values(values, WeightOrder::Rows) => WeightView::Rows(values.view()?),
            Guarded::Values(values, WeightOrder::Panels) => WeightView::Panels(PanelsView(values.view()?)),
            Guarded::Quantised(q) => WeightView::Quantised(q.view()),
        })
    }
}
