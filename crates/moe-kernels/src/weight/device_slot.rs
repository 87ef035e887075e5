//! Reads and writes one expert of a pack on a device as bytes, without the host. Ranks copy these bytes from GPU to GPU
//! when an expert moves.
//!
//! An expert of floats is one contiguous piece. A quantised expert has up to three: integers, scales, zero points. The
//! bytes of an expert are its pieces, one after the other.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{Result, bail};

use super::quantised::{Pack, Quantised};
use super::slot::OP;
use super::{Weight, WeightData, WeightView};
use crate::buffer::Buffer;
use crate::exec::Exec;
use crate::storage::{Data, DataMut, DeviceSlice};
use crate::tensor::TensorView;
use crate::view::{View, ViewMut};

impl Weight {
    /// Passes the bytes of `expert` in a pack [E, N, K] on a device to `see`, piece by piece, each with its index among
    /// the [`expert_len`](Weight::expert_len) bytes.
    ///
    /// # Errors
    /// The errors of `expert_len` and `see`; weights on the CPU; an expert that does not exist.
    pub fn see_expert(
        &self,
        expert: usize,
        mut see: impl FnMut(Range<usize>, View<'_>) -> Result<()>,
    ) -> Result<()> {
        self.each_piece(expert, |place, bytes| {
            let len = place.len();
            see(place, View::from_data(Data::Device(bytes), &[len])?)
        })
    }

    /// Overwrites `expert` of a pack on a device, and of all its clones, with bytes on the device, in the order of the
    /// context's stream.
    ///
    /// # Errors
    /// The errors of [`see_expert`](Self::see_expert); a wrong number of bytes, in which case nothing has changed.
    pub fn replace_expert(&self, expert: usize, bytes: View<'_>, ex: &Exec) -> Result<()> {
        let len = self.checked(expert)?;
        if bytes.elem_count() != len {
            bail!("{OP}: expected {len} bytes, got {}", bytes.elem_count())
        }
        self.each_piece(expert, |place, own| {
            let new = bytes.narrow(place.start, place.len())?;
            ex.copy(new, ViewMut::from_data(DataMut::Device(own), &[place.len()])?)
        })
    }

    /// A pack with another number of experts in the order of this pack, made of arrays as in [`WeightView::arrays`].
    pub(crate) fn of_arrays(&self, mut arrays: Vec<Buffer>, experts: usize) -> Result<Self> {
        let mut dims = self.dims().to_vec();
        dims[0] = experts;
        match &self.0 {
            WeightData::Values(..) => match arrays.pop().filter(|_| arrays.is_empty()) {
                Some(rows) => Self::new(rows.into_tensor()?.reshape(dims)?),
                None => bail!("{OP}: expected one array of floats"),
            },
            WeightData::Quantised(q) => match &q.pack {
                Pack::Cuda(pack) => {
                    let pack = Pack::Cuda(Arc::new(pack.of_arrays(arrays, experts)?));
                    Ok(Self(WeightData::Quantised(Quantised { pack, dims, dtype: q.dtype })))
                }
                Pack::Cpu(_) => bail!("{OP}: expected a pack on a CUDA device, got one on the CPU"),
            },
        }
    }

    fn each_piece(
        &self,
        expert: usize,
        mut each: impl FnMut(Range<usize>, DeviceSlice<'_>) -> Result<()>,
    ) -> Result<()> {
        self.checked(expert)?;
        let mut first = 0;
        let mut piece = |piece: View<'_>| match piece.data() {
            Data::Device(slice) => {
                let place = first..first + piece.elem_count() * piece.dtype().size_in_bytes();
                first = place.end;
                each(place, slice.bytes())
            }
            _ => bail!("{OP}: expected a pack on a CUDA device, got one on the CPU"),
        };
        match &self.0 {
            WeightData::Values(values, _) => piece(TensorView::new(values)?.view()?.narrow(expert, 1)?),
            WeightData::Quantised(q) => match &q.pack {
                Pack::Cuda(pack) => pack.expert_pieces(expert)?.into_iter().try_for_each(piece),
                Pack::Cpu(_) => bail!("{OP}: expected a pack on a CUDA device, got one on the CPU"),
            },
        }
    }
}

impl<'a> WeightView<'a> {
    /// The arrays of a pack on a device, with experts one after the other in each: the rows of floats, or the integers,
    /// scales and zero points of a quantised pack.
    pub(crate) fn arrays(&self, op: &str) -> Result<Vec<View<'a>>> {
        match self {
            Self::Quantised(q) => Ok(q.device_pack(op)?.arrays()),
            _ => Ok(vec![self.rows(op)?]),
        }
    }
}
