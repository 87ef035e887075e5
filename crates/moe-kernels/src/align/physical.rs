//! Converts logical expert ids to physical ones: the choice of the copy of an expert that computes a row.

use candle_core::{DType, Result, bail};
use rayon::prelude::*;

use super::check_ids;
use super::log2phy::Log2Phy;
use crate::arguments::expect;
use crate::exec::Exec;
use crate::routed::NO_EXPERT;
use crate::view::{View, ViewMut};

/// The name of the launch of [`physical_ids_into`] in plans.
pub const PHYSICAL_IDS: &str = "physical_ids";

/// Replaces logical expert ids by physical ones.
///
/// | argument | shape, dtype |
/// |---|---|
/// | `topk_ids` | [T, K] u32, logical expert ids, [`NO_EXPERT`] = no expert |
/// | `log2phy` | the copies of E experts |
/// | `out` | [T, K] u32: the id of one copy; `NO_EXPERT` if there is no expert |
///
/// # Errors
/// Wrong dtypes or dims. On the CPU also an id outside of `log2phy` and an expert without a copy; on CUDA these count
/// as no expert.
pub fn physical_ids_into(topk_ids: View, log2phy: &Log2Phy, mut out: ViewMut, ex: &mut Exec) -> Result<()> {
    check_ids(PHYSICAL_IDS, topk_ids)?;
    let (experts, width) = log2phy.check(PHYSICAL_IDS)?;
    expect(PHYSICAL_IDS, "out", &out, DType::U32, topk_ids.dims())?;
    ex.launched(|| PHYSICAL_IDS);
    #[cfg(feature = "cuda")]
    if ex.is_cuda() {
        return crate::cuda::any::physical_ids(ex.cuda(PHYSICAL_IDS)?, PHYSICAL_IDS, topk_ids, log2phy, out);
    }
    let &Log2Phy { ids: table, spread, first_row } = log2phy;
    let ids = topk_ids.cpu::<u32>()?;
    let table = table.cpu::<i32>()?;
    let top_k = topk_ids.dims()[1].max(1);
    let choose = |row: usize, id: u32| -> Result<u32> {
        if id == NO_EXPERT {
            return Ok(NO_EXPERT);
        }
        if id as usize >= experts {
            bail!("{PHYSICAL_IDS}: expert id {id} is out of range; log2phy holds {experts} logical experts")
        }
        let copies = &table[id as usize * width..][..width];
        let count = copies.iter().take_while(|&&copy| copy >= 0).count() as u32;
        match copies.get(spread.copy((first_row + row) as u32, id, count) as usize) {
            Some(&copy) if copy >= 0 => Ok(copy as u32),
            _ => bail!("{PHYSICAL_IDS}: log2phy names no copy of expert {id}"),
        }
    };
    let rows = out.cpu_mut::<u32>()?.par_chunks_mut(top_k).zip(ids.par_chunks(top_k)).enumerate();
    ex.install(|| {
        rows.with_min_len(256).try_for_each(|(row, (out, ids))| {
            out.iter_mut().zip(ids).try_for_each(|(out, &id)| {
                *out = choose(row, id)?;
                Ok(())
            })
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::align::Spread;
    use proptest::prelude::*;

    fn physical(
        ids: &[u32],
        k: usize,
        table: (&[i32], usize),
        spread: Spread,
        first: usize,
    ) -> Result<Vec<u32>> {
        let mut out = vec![7; ids.len()];
        let dims = [ids.len() / k, k];
        let table_dims = [table.0.len() / table.1, table.1];
        let log2phy = Log2Phy { ids: View::new(table.0, &table_dims)?, spread, first_row: first };
        let ids = View::new(ids, &dims)?;
        let to = ViewMut::new(&mut out, &dims)?;
        physical_ids_into(ids, &log2phy, to, &mut Exec::cpu())?;
        Ok(out)
    }

    #[test]
    fn copies_take_turns_by_row() -> Result<()> {
        let table: (&[i32], usize) = (&[5, -1, 0, 3], 2);
        let ids = [1, 0, 1, NO_EXPERT, 0, 1];
        assert_eq!(physical(&ids, 2, table, Spread::InTurns, 0)?, [3, 5, 0, NO_EXPERT, 5, 3]);
        assert_eq!(physical(&ids, 2, table, Spread::InTurns, 1)?, [0, 5, 3, NO_EXPERT, 5, 0]);
        assert!(physical(&[], 2, table, Spread::InTurns, 0)?.is_empty());
        let error = |ids: &[u32], table| physical(ids, 1, table, Spread::Hashed, 0).unwrap_err().to_string();
        assert!(error(&[2], table).contains("expert id 2 is out of range; log2phy holds 2"));
        assert!(error(&[0], (&[-1, -1], 2)).contains("no copy of expert 0"));
        Ok(())
    }

    proptest! {
        /// Each copy gets about its share, and a part of the rows gets the same copies as in the whole.
        #[test]
        fn rows_are_spread_evenly(expert in 0u32..3, copies in 1u32..6, hashed in any::<bool>(), cut in 0usize..2000) {
            let spread = if hashed { Spread::Hashed } else { Spread::InTurns };
            let table: Vec<i32> = (0..3 * copies as i32).collect();
            let ids = vec![expert; 2000];
            let all = physical(&ids, 1, (&table, copies as usize), spread, 0).unwrap();
            let rest = physical(&ids[cut..], 1, (&table, copies as usize), spread, cut).unwrap();
            prop_assert_eq!(&all[cut..], &rest);
            for copy in expert * copies..(expert + 1) * copies {
                let got = all.iter().filter(|&&id| id == copy).count() as f64;
                let even = 2000.0 / f64::from(copies);
                prop_assert!((got - even).abs() <= if hashed { 0.2 * even } else { 1.0 }, "{got} of {even}");
            }
        }
    }
}
