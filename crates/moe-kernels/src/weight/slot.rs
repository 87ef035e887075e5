//! One expert of a pack as bytes. Ranks send each other these bytes when an expert moves.
//!
//! The bytes are in the pack's own order (rows, panels, quantised panels). They are the same for the same expert in any
//! pack of the same shape, dtype and instruction set, so that a checksum of them identifies the expert's weights.
//! Writing changes all clones of a weight at once. The caller of a write must make sure that no product reads the
//! weight at the same time.

use candle_core::{DType, Device, Result, Tensor, bail};
use half::{bf16, f16};

use super::quantised::Pack;
use super::{Weight, WeightData};
use crate::tensor::TensorView;
use crate::view::View;

pub(super) const OP: &str = "an expert's weights";

impl Weight {
    /// The number of bytes that [`expert_bytes`](Self::expert_bytes) returns for one expert of a pack [E, N, K].
    ///
    /// # Errors
    /// A matrix; quantised experts that each have their own order of columns.
    pub fn expert_len(&self) -> Result<usize> {
        let &[_, n, k] = self.dims() else { bail!("{OP}: expected a pack [E, N, K], got {:?}", self.dims()) };
        match &self.0 {
            WeightData::Values(values, _) => Ok(n * k * values.dtype().size_in_bytes()),
            WeightData::Quantised(q) => match &q.pack {
                Pack::Cpu(matrix) => matrix.read().expert_len(),
                #[cfg(feature = "cuda")]
                Pack::Cuda(pack) => pack.expert_len(),
            },
        }
    }

    /// The weights of `expert` of a pack [E, N, K], little endian, in the order of the pack.
    ///
    /// # Errors
    /// The errors of [`expert_len`](Self::expert_len); an expert that does not exist; weights on a device.
    pub fn expert_bytes(&self, expert: usize) -> Result<Vec<u8>> {
        let len = self.checked(expert)?;
        match &self.0 {
            WeightData::Values(values, _) => {
                let guard = TensorView::new(values)?;
                to_bytes(guard.view()?.narrow(expert, 1)?, len)
            }
            WeightData::Quantised(q) => match &q.pack {
                Pack::Cpu(matrix) => matrix.read().expert_bytes(expert),
                #[cfg(feature = "cuda")]
                Pack::Cuda(_) => bail!("{OP}: a pack on a CUDA device"),
            },
        }
    }

    /// Overwrites `expert` of a pack, and of all its clones, with the result of [`expert_bytes`](Self::expert_bytes) of
    /// an equal pack.
    ///
    /// # Errors
    /// The errors of `expert_bytes`; a wrong number of bytes. Then nothing has changed.
    pub fn write_expert(&self, expert: usize, bytes: &[u8]) -> Result<()> {
        let len = self.checked(expert)?;
        if bytes.len() != len {
            bail!("{OP}: expected {len} bytes, got {}", bytes.len())
        }
        match &self.0 {
            WeightData::Values(values, _) => {
                let dims = values.dims().get(1..).unwrap_or_default();
                values.slice_set(&of_bytes(bytes, &[&[1], dims].concat(), values.dtype())?, 0, expert)
            }
            WeightData::Quantised(q) => match &q.pack {
                Pack::Cpu(matrix) => matrix.write().write_expert(expert, bytes),
                #[cfg(feature = "cuda")]
                Pack::Cuda(_) => bail!("{OP}: a pack on a CUDA device"),
            },
        }
    }

    /// The properties, in addition to shape and dtype, that two packs of equal experts must share if
    /// [`expert_bytes`](Self::expert_bytes) of one is to be valid in the other. On a device these are the types of the
    /// scales of quantised experts, which are as short as all experts allow.
    pub fn expert_form(&self) -> String {
        #[cfg(feature = "cuda")]
        if let WeightData::Quantised(q) = &self.0
            && let Pack::Cuda(pack) = &q.pack
        {
            return pack.scale_form();
        }
        String::new()
    }

    pub(super) fn checked(&self, expert: usize) -> Result<usize> {
        let len = self.expert_len()?;
        let experts = self.dims()[0];
        if expert >= experts {
            bail!("{OP}: expected one of {experts}, got number {expert}")
        }
        Ok(len)
    }
}

fn to_bytes(values: View, len: usize) -> Result<Vec<u8>> {
    fn all<T: Copy, const N: usize>(values: &[T], len: usize, bytes: impl Fn(T) -> [u8; N]) -> Vec<u8> {
        let mut out = Vec::with_capacity(len);
        values.iter().for_each(|&x| out.extend_from_slice(&bytes(x)));
        out
    }
    Ok(match values.dtype() {
        DType::F32 => all(values.cpu::<f32>()?, len, f32::to_le_bytes),
        DType::BF16 => all(values.cpu::<bf16>()?, len, bf16::to_le_bytes),
        DType::F16 => all(values.cpu::<f16>()?, len, f16::to_le_bytes),
        other => bail!("{OP}: expected f32, bf16 or f16, got {}", other.as_str()),
    })
}

fn of_bytes(bytes: &[u8], dims: &[usize], dtype: DType) -> Result<Tensor> {
    fn all<T, const N: usize>(bytes: &[u8], of: impl Fn([u8; N]) -> T) -> Vec<T> {
        bytes.as_chunks::<N>().0.iter().map(|&chunk| of(chunk)).collect()
    }
    match dtype {
        DType::F32 => Tensor::from_vec(all(bytes, f32::from_le_bytes), dims, &Device::Cpu),
        DType::BF16 => Tensor::from_vec(all(bytes, bf16::from_le_bytes), dims, &Device::Cpu),
        DType::F16 => Tensor::from_vec(all(bytes, f16::from_le_bytes), dims, &Device::Cpu),
        other => bail!("{OP}: expected f32, bf16 or f16, got {}", other.as_str()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exec::CpuIsa;
    use crate::weight::WeightOrder;

    fn pack(dtype: DType, seed: f32) -> Tensor {
        let values: Vec<f32> = (0..3 * 32 * 16).map(|i| (i as f32 * 0.37 + seed).sin()).collect();
        Tensor::from_vec(values, (3, 32, 16), &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
    }

    fn rows(weight: &Weight) -> Vec<f32> {
        let rows = weight.to_tensor().unwrap().to_dtype(DType::F32).unwrap();
        rows.flatten_all().unwrap().to_vec1().unwrap()
    }

    #[test]
    fn an_expert_moves_between_packs_in_rows_and_panels() -> Result<()> {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            for isa in [CpuIsa::Scalar, CpuIsa::Avx2] {
                let new = |seed| Weight::new(pack(dtype, seed))?.packed(Some(isa), 32);
                let from = new(0.1)?;
                let to = new(5.0)?;
                let panels = isa == CpuIsa::Avx2;
                assert_eq!(to.order() == WeightOrder::Panels, panels);
                let clone = to.clone();
                let before = rows(&to);
                let source = rows(&from);
                let bytes = from.expert_bytes(2)?;
                assert_eq!(bytes.len(), from.expert_len()?);
                to.write_expert(1, &bytes)?;
                let size = 32 * 16;
                let after = rows(&clone);
                assert_eq!(after[..size], before[..size]);
                assert_eq!(after[size..2 * size], source[2 * size..]);
                assert_eq!(after[2 * size..], before[2 * size..]);
                assert_eq!(to.expert_bytes(1)?, bytes);
            }
        }
        Ok(())
    }

    #[test]
    fn wrong_numbers_and_bytes_are_refused_and_change_nothing() -> Result<()> {
        let weight = Weight::new(pack(DType::F32, 0.0))?;
        let before = rows(&weight);
        let said = |e: Result<()>| e.unwrap_err().to_string();
        assert!(said(weight.write_expert(3, &[0; 32 * 16 * 4])).contains("expected one of 3, got number 3"));
        assert!(said(weight.write_expert(0, &[0; 5])).contains("expected 2048 bytes, got 5"));
        assert!(said(weight.expert_bytes(9).map(drop)).contains("got number 9"));
        assert_eq!(rows(&weight), before);
        let matrix = Weight::new(pack(DType::F32, 0.0).get(0)?)?;
        assert!(said(matrix.expert_len().map(drop)).contains("expected a pack [E, N, K], got [32, 16]"));
        Ok(())
    }
}
