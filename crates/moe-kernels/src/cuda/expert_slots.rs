//! A layer's experts on a device with fewer slots than experts: tables, homes in host memory, and the launches that
//! bring a step's experts into the slots.
//!
//! The host decides nothing while a model runs: which experts are needed is known on the device alone, so the launches
//! between router and products choose, exchange and leave a map from experts to slots ([`Residency`] is their rule).
//! Homes are page-locked memory that the device reads and writes by itself.

use std::ffi::c_void;
use std::time::Instant;

use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::result;
use candle_core::{DType, Result, bail};

use super::args::{ExpertExchangeArgs, ExpertResidencyArgs};
use super::locked::LockedMemory;
use super::{CudaExec, ffi, small};
use crate::buffer::Buffer;
use crate::exec::Exec;
use crate::residency::{ExpertTraffic, Place, Residency, max_passes};
use crate::view::View;
use crate::weight::{Weight, WeightView};

const OP: &str = "expert_slots";

/// The number of experts that a measurement of the bus exchanges; it moves them there and back `MEASUREMENTS` times.
const MEASURED: usize = 8;
const MEASUREMENTS: usize = 3;

/// Where the experts of a layer are, and the weights of the experts that are in no slot.
pub struct ExpertSlots {
    num_experts: usize,
    num_slots: usize,
    /// Bytes of an expert's w13 and w2 in each pair of arrays: one pair for floats; for quantised weights one pair of
    /// integers, one of scales and one of zero points.
    lens: Vec<[usize; 2]>,
    /// The arrays of `ExpertResidencyArgs`: [E], [E], [S], [E], [E], [1 + 2 S], \[2\].
    place: Buffer,
    heat: Buffer,
    held: Buffer,
    pending: Buffer,
    map: Buffer,
    exchanges: Buffer,
    counts: Buffer,
    homes_address: u64,
    cuda: CudaExec,
    _homes: LockedMemory,
}

impl ExpertSlots {
    /// Splits the packs of a layer, w13 [E, 2I, H] and w2 [E, H, I] in rows or quantised on a device. The first
    /// `num_slots` experts are copied to packs of their own on the device, which are returned too. The other experts
    /// are copied to their homes. The caller drops the packs that were given, if the memory is to be free.
    ///
    /// # Errors
    /// Quantised packs with act-order, or in different formats; no slot, or one for every expert; experts whose arrays
    /// are no multiples of 16 bytes; memory that the device or the host refuses.
    pub fn split(packs: [&Weight; 2], num_slots: usize, ex: &Exec) -> Result<(Self, [Weight; 2])> {
        let num_experts = packs[0].dims()[0];
        if num_slots == num_experts {
            bail!("{OP}: expected fewer slots than the {num_experts} experts, got {num_slots}")
        }
        let residency = Residency::new(num_experts, num_slots)?;
        packs.iter().try_for_each(|pack| pack.expert_len().map(drop))?;
        let guards = [packs[0].read()?, packs[1].read()?];
        let [w13, w2] = [guards[0].view()?.arrays(OP)?, guards[1].view()?.arrays(OP)?];
        let len = |all: &View| bytes_of(*all) / num_experts;
        let lens: Vec<[usize; 2]> = w13.iter().zip(&w2).map(|(w13, w2)| [len(w13), len(w2)]).collect();
        if w13.len() != w2.len() || lens.as_flattened().iter().any(|len| !len.is_multiple_of(16)) {
            bail!(
                "{OP}: expected arrays of an expert in multiples of 16 bytes, as many of w13 as of w2, got {lens:?} bytes of {} and {}",
                w13.len(),
                w2.len()
            )
        }
        let num_homes = num_experts - num_slots;
        let expert: usize = lens.as_flattened().iter().sum();
        let context = ex.cuda(OP)?.stream.context().clone();
        let mut homes = LockedMemory::new(&context, num_homes.saturating_mul(expert))?;
        let mut regions = split_regions(&mut homes, &lens, num_homes);
        let mut keep = |all: &[View], which: usize| -> Result<Vec<Buffer>> {
            let each = all.iter().zip(&mut regions).zip(&lens);
            each.map(|((all, region), lens)| {
                let places = region.chunks_exact_mut(lens[0] + lens[1]).map(|home| {
                    let (first, second) = home.split_at_mut(lens[0]);
                    if which == 0 { first } else { second }
                });
                keep_some(*all, num_experts, num_slots, places, ex)
            })
            .collect()
        };
        let kept = keep(&w13, 0).and_then(|kept| Ok([kept, keep(&w2, 1)?]));
        // This waits even after a failure: the packs and homes may be freed next, so no copy may still be running.
        ex.synchronize()?;
        let [w13, w2] = kept?;
        let slots = [packs[0].of_arrays(w13, num_slots)?, packs[1].of_arrays(w2, num_slots)?];
        Ok((Self::new(&residency, lens, homes, ex)?, slots))
    }

    fn new(residency: &Residency, lens: Vec<[usize; 2]>, homes: LockedMemory, ex: &Exec) -> Result<Self> {
        let num_experts = residency.places().len();
        let num_slots = residency.held().len();
        let words: Vec<i32> = residency.places().iter().map(|place| word(*place)).collect();
        let held: Vec<i32> = residency.held().iter().map(|&expert| expert as i32).collect();
        let zeros = |dtype, len: usize| Buffer::zeros_on(ex.device(), dtype, &[len]);
        Ok(Self {
            num_experts,
            num_slots,
            lens,
            place: on_device(&words, ex)?,
            heat: zeros(DType::U32, num_experts)?,
            held: on_device(&held, ex)?,
            pending: zeros(DType::I32, num_experts)?,
            map: zeros(DType::I32, num_experts)?,
            exchanges: zeros(DType::I32, 1 + 2 * num_slots)?,
            counts: zeros(DType::I64, 2)?,
            homes_address: homes.device_address()?,
            cuda: ex.cuda(OP)?.clone(),
            _homes: homes,
        })
    }

    /// Experts E.
    pub fn num_experts(&self) -> usize {
        self.num_experts
    }

    /// Slots S.
    pub fn num_slots(&self) -> usize {
        self.num_slots
    }

    /// The largest number of passes of a step with `choices` choices (rows times K).
    pub fn passes(&self, choices: usize) -> usize {
        max_passes(self.num_experts, self.num_slots, choices)
    }

    /// The slot of each expert that the pass computes, -1 = none: \[E\] i32, of the last [`fetch`](Self::fetch).
    pub fn map(&self) -> View<'_> {
        self.map.view()
    }

    /// Brings the experts of a pass into the slots. A step's first pass takes the experts that `topk_ids` [T, K] u32
    /// names, as far as there are slots, later passes the remaining ones. `packs` are w13 and w2 of the slots, in the
    /// order of the stream.
    pub(crate) fn fetch(&self, first: bool, topk_ids: View, packs: [WeightView; 2]) -> Result<()> {
        let cuda = &self.cuda;
        let table = |name, buffer: &Buffer| cuda.read(OP, name, buffer.view()).map(<*const c_void>::cast_mut);
        let args = ExpertResidencyArgs {
            topk_ids: cuda.read(OP, "topk_ids", topk_ids)?,
            place: table("place", &self.place)?,
            heat: table("heat", &self.heat)?,
            held: table("held", &self.held)?,
            pending: table("pending", &self.pending)?,
            map: table("map", &self.map)?,
            exchanges: table("exchanges", &self.exchanges)?,
            counts: table("counts", &self.counts)?,
            count: small(OP, topk_ids.elem_count())?,
            num_experts: small(OP, self.num_experts)?,
            num_slots: small(OP, self.num_slots)?,
            first: i32::from(first),
        };
        // SAFETY: the tables have the sizes that the launcher asks for, and are written by launches of this stream
        // alone.
        cuda.check("expert_residency", unsafe { ffi::moe_expert_residency(&args, cuda.raw()?) })?;
        self.exchange(packs)
    }

    /// Carries out the list of exchanges: a launch for each pair of arrays.
    fn exchange(&self, [w13, w2]: [WeightView; 2]) -> Result<()> {
        let cuda = &self.cuda;
        let w13 = w13.arrays(OP)?;
        let w2 = w2.arrays(OP)?;
        let mut homes = self.homes_address;
        for (i, lens) in self.lens.iter().enumerate() {
            let pair = [&w13, &w2].map(|arrays| arrays.get(i).copied());
            let [Some(w13), Some(w2)] = pair else {
                bail!(
                    "{OP}: expected {} arrays of each pack, got {} and {}",
                    self.lens.len(),
                    w13.len(),
                    w2.len()
                )
            };
            for (name, array, len) in [("w13", w13, lens[0]), ("w2", w2, lens[1])] {
                let expected = self.num_slots * len;
                let got = bytes_of(array);
                if expected != got {
                    bail!("{OP}: expected {name} of {} slots, {expected} bytes, got {got}", self.num_slots)
                }
            }
            let args = ExpertExchangeArgs {
                exchanges: cuda.read(OP, "exchanges", self.exchanges.view())?,
                w13: cuda.read::<c_void>(OP, "w13", w13)?.cast_mut(),
                w2: cuda.read::<c_void>(OP, "w2", w2)?.cast_mut(),
                homes: homes as *mut _,
                w13_bytes: i64::try_from(lens[0]).map_err(candle_core::Error::wrap)?,
                w2_bytes: i64::try_from(lens[1]).map_err(candle_core::Error::wrap)?,
            };
            // SAFETY: slots and homes have the sizes checked here and by `split`, the list names some of each, and only
            // launches of this stream read or write them.
            cuda.check("expert_exchange", unsafe { ffi::moe_expert_exchange(&args, cuda.raw()?) })?;
            homes += ((self.num_experts - self.num_slots) * (lens[0] + lens[1])) as u64;
        }
        Ok(())
    }

    /// Bytes of an expert.
    fn expert_bytes(&self) -> usize {
        self.lens.as_flattened().iter().sum()
    }

    /// What steps have needed and fetched, after all work before: waits for the device.
    ///
    /// # Errors
    /// The device fails.
    pub fn traffic(&self, ex: &Exec) -> Result<ExpertTraffic> {
        let counts = ex.to_host(self.counts.view())?;
        let counts = counts.view().cpu::<i64>()?;
        Ok(ExpertTraffic {
            num_experts: self.num_experts,
            num_slots: self.num_slots,
            expert_bytes: self.expert_bytes(),
            needed: counts[0] as u64,
            fetched: counts[1] as u64,
        })
    }

    /// Bytes a second that an exchange brings to the device while the same number leaves it. It measures some experts
    /// that change places and back.
    ///
    /// # Errors
    /// The device fails; packs of another size.
    pub fn measure(&mut self, [w13, w2]: [&Weight; 2], ex: &Exec) -> Result<f64> {
        let count = MEASURED.min(self.num_slots).min(self.num_experts - self.num_slots);
        let mut list = vec![0i32; 1 + 2 * self.num_slots];
        list[0] = count as i32;
        list[1..].chunks_exact_mut(2).take(count).enumerate().for_each(|(i, pair)| pair.fill(i as i32));
        let list = Buffer::from_vec(list, &[1 + 2 * self.num_slots])?;
        ex.copy_from_host(list.view(), self.exchanges.view_mut())?;
        let w13 = w13.read()?;
        let w2 = w2.read()?;
        let packs = [w13.view()?, w2.view()?];
        let mut best = f64::INFINITY;
        for _ in 0..2 * MEASUREMENTS {
            let start = Instant::now();
            self.exchange(packs)?;
            self.cuda.synchronize()?;
            best = best.min(start.elapsed().as_secs_f64());
        }
        Ok((count * self.expert_bytes()) as f64 / best)
    }
}

impl Drop for ExpertSlots {
    fn drop(&mut self) {
        // Launches may still exchange with the homes; an error shows at the next use of the device.
        _ = self.cuda.synchronize();
    }
}

impl std::fmt::Debug for ExpertSlots {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut out = f.debug_struct("ExpertSlots");
        out.field("num_experts", &self.num_experts)
            .field("num_slots", &self.num_slots)
            .finish_non_exhaustive()
    }
}

/// A place as the device writes it.
fn word(place: Place) -> i32 {
    match place {
        Place::Slot(slot) => slot as i32,
        Place::Home(home) => -1 - home as i32,
    }
}

fn on_device(words: &[i32], ex: &Exec) -> Result<Buffer> {
    ex.buffer_from_host(View::new(words, &[words.len()])?)
}

/// Splits the homes into a region for each pair of arrays, with the two arrays of an expert one after the other.
fn split_regions<'a>(mut homes: &'a mut [u8], lens: &[[usize; 2]], num_homes: usize) -> Vec<&'a mut [u8]> {
    let region = |lens: &[usize; 2]| {
        let (region, rest) = std::mem::take(&mut homes).split_at_mut(num_homes * (lens[0] + lens[1]));
        homes = rest;
        region
    };
    lens.iter().map(region).collect()
}

/// Copies the first experts' part of an array to memory of its own and starts copies of the other experts' parts home.
fn keep_some<'a>(
    all: View,
    num_experts: usize,
    num_slots: usize,
    homes: impl Iterator<Item = &'a mut [u8]>,
    ex: &Exec,
) -> Result<Buffer> {
    let all = all.reshape(&[all.elem_count()])?;
    let each = all.elem_count() / num_experts;
    let mut kept = Buffer::unspecified_on(ex.device(), all.dtype(), &[num_slots * each])?;
    ex.copy(all.narrow(0, num_slots * each)?, kept.view_mut())?;
    for (home, bytes) in homes.enumerate() {
        send_home(all.narrow((num_slots + home) * each, each)?, bytes, ex)?;
    }
    Ok(kept)
}

fn bytes_of(view: View) -> usize {
    view.elem_count() * view.dtype().size_in_bytes()
}

/// Puts a copy from the device to `home` on the stream; the caller waits for it before either side goes.
fn send_home(expert: View, home: &mut [u8], ex: &Exec) -> Result<()> {
    let cuda = ex.cuda(OP)?;
    let address = cuda.read::<u8>(OP, "pack", expert)?;
    let bytes = bytes_of(expert);
    if bytes != home.len() {
        bail!("{OP}: expected a home of {bytes} bytes, got {}", home.len())
    }
    cuda.raw()?; // makes the device current on this thread
    // SAFETY: both sides hold `bytes` bytes, and the caller keeps them until the stream has ended.
    unsafe { result::memcpy_dtoh_async(home, address as u64, cuda.stream.cu_stream()) }.w()
}
