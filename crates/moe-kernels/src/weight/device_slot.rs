//! One expert of a pack on a device as bytes, without the host: what ranks copy from GPU to GPU when an expert moves.

use candle_core::{Result, bail};

use super::slot::OP;
use super::{Held, Weight};
use crate::exec::Exec;
use crate::storage::{Data, DataMut, DeviceSlice};
use crate::tensor::TensorView;
use crate::view::{View, ViewMut};

impl Weight {
    /// Shows the bytes [`expert_len`](Weight::expert_len) u8 of `expert` of a pack [E, N, K] on a device, in the order that
    /// [`expert_bytes`](Weight::expert_bytes) has on the CPU.
    ///
    /// # Errors
    /// A matrix; quantised weights; weights on the CPU; an expert that there is not; those of `see`.
    pub fn see_expert<R>(&self, expert: usize, see: impl FnOnce(View<'_>) -> Result<R>) -> Result<R> {
        self.on_device(expert, |bytes, len| see(View::from_data(Data::Device(bytes), &[len])?))
    }

    /// Overwrites `expert` of a pack on a device, and of all its clones, by bytes there, in the order of the context's stream.
    ///
    /// # Errors
    /// Those of [`see_expert`](Self::see_expert); another number of bytes, with nothing changed.
    pub fn replace_expert(&self, expert: usize, bytes: View<'_>, ex: &Exec) -> Result<()> {
        self.on_device(expert, |own, len| {
            if bytes.elem_count() != len {
                bail!("{OP}: expected {len} bytes, got {}", bytes.elem_count())
            }
            ex.copy(bytes, ViewMut::from_data(DataMut::Device(own), &[len])?)
        })
    }

    fn on_device<R>(&self, expert: usize, f: impl FnOnce(DeviceSlice<'_>, usize) -> Result<R>) -> Result<R> {
        let len = self.checked(expert)?;
        let Held::Values(values, _) = &self.0 else { bail!("{OP}: expected floats, got a quantised pack") };
        let guard = TensorView::new(values)?;
        match guard.view()?.narrow(expert, 1)?.data() {
            Data::Device(slice) => f(slice.bytes(), len),
            _ => bail!("{OP}: expected a pack on a CUDA device, got one on the CPU"),
        }
    }
}
