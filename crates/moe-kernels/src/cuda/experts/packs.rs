//! The packed weights that the launches of an expert layer read.

use candle_core::{Result, bail};

use crate::cuda::args::{In, QuantPack};
use crate::exec::Exec;
use crate::weight::WeightView;

/// The weights of both products.
#[derive(Clone, Copy)]
pub(super) enum Packs {
    /// bf16.
    Floats {
        w13: In,
        w2: In,
    },
    Quantised {
        w13: QuantPack,
        w2: QuantPack,
    },
}

impl Packs {
    pub(super) fn of(op: &str, packs: [WeightView; 2], ex: &Exec) -> Result<Self> {
        let cuda = ex.cuda(op)?;
        Ok(match packs {
            [WeightView::Quantised(w13), WeightView::Quantised(w2)] => Self::Quantised {
                w13: w13.device_pack(op)?.args(op, cuda)?,
                w2: w2.device_pack(op)?.args(op, cuda)?,
            },
            [w13, w2] => Self::Floats {
                w13: cuda.read(op, "w13", w13.rows(op)?)?,
                w2: cuda.read(op, "w2", w2.rows(op)?)?,
            },
        })
    }

    /// The addresses of floats.
    pub(super) fn floats(self, op: &str) -> Result<(In, In)> {
        match self {
            Self::Floats { w13, w2 } => Ok((w13, w2)),
            Self::Quantised { .. } => bail!("{op}: no kernel for quantised weights of these sizes"),
        }
    }
}
