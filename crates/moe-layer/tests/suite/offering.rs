//! Ranks of threads that accept every fused collective, like ranks of GPUs, and run it as plain ones.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use moe_comm::{
    Collective, Collectives, Communicator, FusedCollective, FusedCollectives, ReduceOp, RowNeeds,
};
use moe_kernels::fill_into;
use moe_layer::candle::Result;
use moe_layer::{Buffer, DType, Exec, ViewMut};

/// The names of the calls that ranks have accepted.
pub type Taken = Arc<Mutex<BTreeSet<&'static str>>>;

/// A rank of a communicator that has no fused collectives itself. Rows that a rank does not need are overwritten, so a
/// layer that reads them returns other bits.
#[derive(Debug)]
pub struct Offering {
    plain: Arc<dyn Communicator>,
    taken: Taken,
}

impl Offering {
    pub fn over(plain: Arc<dyn Communicator>, taken: &Taken) -> Arc<dyn Communicator> {
        Arc::new(Self { plain, taken: taken.clone() })
    }

    /// Overwrites the rows that this rank does not need.
    fn fill_unneeded(&self, value: f32, needs: &RowNeeds, mut rows: ViewMut, ex: &mut Exec) -> Result<()> {
        let owners = needs.owners.cpu::<u32>()?;
        let ids = needs.ids.cpu::<u32>()?;
        let top_k = needs.ids.dims()[1];
        for (row, ids) in ids.chunks(top_k).enumerate() {
            let needed = ids.iter().any(|id| owners.get(*id as usize) == Some(&(self.rank() as u32)));
            if !needed {
                fill_into(value, rows.reborrow().narrow(row, 1)?, ex)?;
            }
        }
        Ok(())
    }
}

impl Communicator for Offering {
    fn rank(&self) -> usize {
        self.plain.rank()
    }
    fn world_size(&self) -> usize {
        self.plain.world_size()
    }
    fn run(&self, collective: Collective<'_>, ex: &mut Exec) -> Result<()> {
        self.plain.run(collective, ex)
    }
    fn fused(&self) -> Option<&dyn FusedCollectives> {
        Some(self)
    }
    fn split(&self, color: usize, key: usize, ex: &mut Exec) -> Result<Arc<dyn Communicator>> {
        Ok(Self::over(self.plain.split(color, key, ex)?, &self.taken))
    }
    fn abort(&self, reason: &str) {
        self.plain.abort(reason);
    }
    fn check(&self) -> Result<()> {
        self.plain.check()
    }
}

impl FusedCollectives for Offering {
    fn shares_residual(&self, _: usize, _: usize, _: DType) -> std::result::Result<(), &'static str> {
        Err("one rank has the tokens")
    }

    fn rounds_sums(&self, _: usize, _: usize, _: DType) -> bool {
        false
    }

    fn dispatches(&self, counts: &[usize], top_k: usize, hidden: usize, _: DType) -> bool {
        assert_eq!((counts.len(), top_k, hidden), (self.world_size(), 2, 16));
        true
    }

    fn combines(&self, counts: &[usize], top_k: usize, hidden: usize, _: DType) -> bool {
        assert_eq!((counts.len(), top_k, hidden), (self.world_size(), 2, 16));
        true
    }

    fn takes(&self, _: &FusedCollective<'_>) -> bool {
        true
    }

    fn run_fused(&self, call: FusedCollective<'_>, ex: &mut Exec) -> Result<()> {
        let name = match call {
            FusedCollective::Gather { arrays, counts, needs } => {
                for (input, mut out) in arrays {
                    self.plain.all_gather_v(input, counts, out.reborrow(), ex)?;
                    if let Some(needs) = &needs {
                        self.fill_unneeded(f32::NAN, needs, out, ex)?;
                    }
                }
                if needs.is_some() { "gather of needed rows" } else { "gather" }
            }
            FusedCollective::Dispatch { rows, ids, weights, counts, owners } => {
                let (input, mut all) = rows;
                let (own_ids, mut all_ids) = ids;
                self.plain.all_gather_v(input, counts, all.reborrow(), ex)?;
                self.plain.all_gather_v(own_ids, counts, all_ids.reborrow(), ex)?;
                self.plain.all_gather_v(weights.0, counts, weights.1, ex)?;
                self.fill_unneeded(f32::NAN, &RowNeeds { ids: all_ids.as_view(), owners }, all, ex)?;
                "dispatch of needed rows"
            }
            FusedCollective::ScatterSums { sums, counts, needs, out } => {
                let mut own = Buffer::zeros(sums.dtype(), sums.dims())?;
                own.view_mut().copy_from(sums)?;
                if let Some(needs) = &needs {
                    self.fill_unneeded(0., needs, own.view_mut(), ex)?;
                }
                self.plain.reduce_scatter_v(own.view(), counts, out, ReduceOp::Sum, ex)?;
                if needs.is_some() { "sums of needed rows" } else { "sums" }
            }
            FusedCollective::CombineAddNorm { .. } => {
                call.run(&*self.plain, ex)?;
                "sums, added and normed"
            }
            FusedCollective::AllReduceAddNorm { .. } | FusedCollective::ShareAddNorm { .. } => {
                panic!("expected what a sparse layer calls, got {call:?}")
            }
        };
        self.taken.lock().unwrap().insert(name);
        Ok(())
    }
}
