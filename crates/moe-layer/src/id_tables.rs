//! The tables in which launches look up the slots of experts.

use moe_comm::ExpertMap;
use moe_kernels::candle::{Device, Result};
use moe_kernels::{Buffer, Exec};

/// The tables of an expert map for launches.
pub(crate) struct Tables<T> {
    /// log2phy [E, max copies] i32 with all copies, one table for the rows of each rank in `near`.
    pub shared: Vec<T>,
    /// log2phy [E, 1] i32 with the copy that computes all rows of an expert, if copies do not share rows.
    pub sole: T,
    /// The same copy \[E\] i32 as a slot of this rank, or -1 if it is on another rank.
    pub sole_here: T,
}

/// A table in the memory of the experts' device. A captured graph reads it at its address.
pub(crate) struct Table {
    /// The ids, i32.
    pub ids: Buffer,
    /// On a device, the ids of the next map. They replace `ids` when the running step has ended.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    pub staged: Option<Buffer>,
}

impl Table {
    fn new(ids: Buffer, device: &Device) -> Result<Self> {
        if device.is_cpu() {
            return Ok(Self { ids, staged: None });
        }
        let ex = Exec::on(device)?;
        let staged = Some(ex.output(ids.dtype(), ids.dims())?);
        Ok(Self { ids: ex.buffer_from_host(ids.view())?, staged })
    }
}

impl Tables<Buffer> {
    pub fn of(map: &ExpertMap, sole: &[u32], near: &[Option<usize>], rank: usize) -> Result<Self> {
        let experts = map.num_experts();
        let own = map.slots(rank);
        let shared =
            near.iter().map(|&near| Buffer::from_vec(map.log2phy(near), &[experts, map.max_copies()]));
        let here = |slot: usize| if own.contains(&slot) { (slot - own.start) as i32 } else { -1 };
        Ok(Self {
            shared: shared.collect::<Result<_>>()?,
            sole: Buffer::from_vec(sole.iter().map(|&slot| slot as i32).collect(), &[experts, 1])?,
            sole_here: Buffer::from_vec(sole.iter().map(|&slot| here(slot as usize)).collect(), &[experts])?,
        })
    }

    pub fn on(self, device: &Device) -> Result<Tables<Table>> {
        let table = |ids| Table::new(ids, device);
        Ok(Tables {
            shared: self.shared.into_iter().map(table).collect::<Result<_>>()?,
            sole: table(self.sole)?,
            sole_here: table(self.sole_here)?,
        })
    }
}

impl<T> Tables<T> {
    pub fn each(&self) -> impl Iterator<Item = &T> {
        [&self.sole, &self.sole_here].into_iter().chain(&self.shared)
    }

    pub fn each_mut(&mut self) -> impl Iterator<Item = &mut T> {
        [&mut self.sole, &mut self.sole_here].into_iter().chain(&mut self.shared)
    }
}

#[cfg(test)]
mod tests {
    use moe_kernels::candle::Error;

    use super::*;

    #[test]
    fn tables_name_all_copies_the_sole_one_and_its_slot_here() -> Result<()> {
        // Expert 0 has a copy on both ranks. The copy on rank 1 computes all of its rows.
        let map = ExpertMap::new(3, &[vec![0, 2], vec![1, 0]]).map_err(Error::wrap)?;
        let words = |buffer: &Buffer| buffer.view().cpu::<i32>().map(<[i32]>::to_vec);
        let tables = Tables::of(&map, &[3, 2, 1], &[None, Some(1)], 1)?;
        assert_eq!(words(&tables.shared[0])?, [0, 3, 2, -1, 1, -1]);
        assert_eq!(words(&tables.shared[1])?, [3, -1, 2, -1, 1, -1]);
        assert_eq!((words(&tables.sole)?, tables.sole.dims()), (vec![3, 2, 1], &[3, 1][..]));
        assert_eq!(words(&tables.sole_here)?, [1, 0, -1]);
        assert_eq!(words(&Tables::of(&map, &[3, 2, 1], &[None], 0)?.sole_here)?, [-1, -1, 1]);
        assert_eq!(tables.each().count(), 4);
        Ok(())
    }
}
