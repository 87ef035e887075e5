//! The program of a step: which launches compute the layers, in their order.
//!
//! It is a pure function of the layers, the step and the machine. [`CausalLm::forward`](crate::CausalLm::forward)
//! executes it, and explanations are made from it (`explain.rs`). It does not determine which kernel an op uses: for
//! that, both ask `moe_kernels::plan`.

use moe_comm::Communicator;
use moe_kernels::plan::{Fusion, Machine, Reason};
use moe_layer::{MoeForm, PlanStep};

use super::layer::{Decoder, Mlp};

/// A launch of a layer, or the launches of a part of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Launch {
    pub layer: usize,
    pub part: Part,
}

/// The launches of a part of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    /// The norm of the residual stream for this reader.
    Norm(Reader),
    /// The mixer, with the ops before and after it that its launches contain.
    Mixer(Fusion),
    /// The addition of the results of the part before to the residual stream, with the norm that this reader reads.
    AddNorm(Reader, Sums),
    /// From here on there are only the rows whose logits are wanted; `normed`: their norm has been computed.
    Keep { rows: usize, normed: bool },
    /// The MLP or the experts, in a form that includes the ops before and after them that their launches contain.
    Mlp(MoeForm),
}

/// What reads a norm of the residual stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reader {
    /// The mixer of a layer.
    Mixer(usize),
    /// The MLP of a layer.
    Mlp(usize),
    /// The projection to the vocabulary.
    LmHead,
}

/// Which results are added to the residual stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sums {
    /// This rank's results, which are complete.
    Own,
    /// The results of all ranks, added to all rows.
    OfRanks,
    /// The results of all ranks. Each rank adds them to its share of the rows, and keeps only these rows of the
    /// residual stream.
    Shared,
}

impl Sums {
    /// What plans call a norm that adds the ranks' sums.
    pub fn kernel(self, ranks: &dyn Communicator) -> String {
        let medium = ranks.medium();
        match self {
            Self::Shared => format!("{medium}: each rank its share of the rows"),
            Self::Own | Self::OfRanks => medium,
        }
    }
}

/// A program that is being written.
struct Writer {
    launches: Vec<Launch>,
    layer: usize,
    /// Whether the next norm has been computed.
    normed: bool,
}

impl Writer {
    fn push(&mut self, part: Part) {
        self.launches.push(Launch { layer: self.layer, part });
    }

    /// Adds the norm that `reader` reads, unless it has been computed.
    fn norm(&mut self, reader: Reader) {
        if !self.normed {
            self.push(Part::Norm(reader));
        }
        self.normed = true;
    }

    /// A sub-layer, which contains `fusion`, with the norms before and after it.
    fn sublayer(&mut self, part: Part, fusion: Fusion, [own, next]: [Reader; 2], sums: Sums) {
        if fusion != Fusion::NormAdd {
            self.norm(own);
        }
        self.push(part);
        if fusion == Fusion::Nothing {
            self.push(Part::AddNorm(next, sums));
        }
        self.normed = matches!(fusion, Fusion::Nothing | Fusion::AddNorm);
    }
}

impl Decoder {
    /// The launches of all layers in this step. If no logits are wanted, it may end before the last MLP.
    pub(super) fn program(&self, step: &PlanStep, machine: &Machine) -> Vec<Launch> {
        let of_ranks = match self.shares_residual(step) {
            _ if self.sums.is_none() => Sums::Own,
            Ok(()) => Sums::Shared,
            Err(_) => Sums::OfRanks,
        };
        let sums = |deferred: bool| if deferred { of_ranks } else { Sums::Own };
        let launches = Vec::with_capacity(4 * self.layers.len() + 3);
        let mut writer = Writer { launches, layer: 0, normed: false };
        for (index, layer) in self.layers.iter().enumerate() {
            writer.layer = index;
            let mut form = layer.choose_mlp(step, machine);
            let fusion = layer.choose_mixer(form.fusion, step, machine);
            let [own, next] = [Reader::Mlp(index), self.after(index)];
            let [of_mixer, of_mlp] = layer.deferred.map(sums);
            writer.sublayer(Part::Mixer(fusion), fusion, [Reader::Mixer(index), own], of_mixer);
            if next == Reader::LmHead && self.drops_rows(step) {
                writer.push(Part::Keep { rows: step.logits, normed: writer.normed });
                if step.logits == 0 {
                    return writer.launches;
                }
                form = layer.choose_mlp(&PlanStep { rows: step.logits, ..*step }, machine);
            }
            writer.sublayer(Part::Mlp(form), form.fusion, [own, next], of_mlp);
        }
        writer.norm(Reader::LmHead);
        writer.launches
    }

    /// The reader of the norm after a layer.
    pub(super) fn after(&self, layer: usize) -> Reader {
        if layer + 1 < self.layers.len() { Reader::Mixer(layer + 1) } else { Reader::LmHead }
    }

    /// Whether rows that need no logits end with the last layer's attention, which caches their keys and values.
    fn drops_rows(&self, step: &PlanStep) -> bool {
        let routes_by_number = match self.layers.last().map(|layer| &layer.mlp) {
            Some(Mlp::Sparse(sparse)) => sparse.routes_by_number(),
            _ => false,
        };
        let few = step.logits < step.rows && step.scored == 0;
        self.ends_few && few && step.asks().is_none() && !routes_by_number
    }

    /// Whether each of the ranks whose sums the norms add keeps only some rows of the residual stream. If not, all of
    /// them keep all rows, and the reason is returned.
    ///
    /// # Errors
    /// The reason why all ranks keep all rows.
    pub(super) fn shares_residual(&self, step: &PlanStep) -> Result<(), Reason> {
        let Some(ranks) = &self.sums else { return Err(Reason::NoGain("no rank shares the tokens")) };
        if step.whole_residual {
            return Err(Reason::NoGain("the hidden states of all rows are asked for"));
        }
        if self.layers.iter().any(|layer| layer.deferred != [true; 2]) {
            return Err(Reason::Part { part: "a sum over ranks that is not left to the norm" });
        }
        let Some(fused) = ranks.fused() else {
            return Err(Reason::NoGain("ranks that share host memory copy rows as fast as they add them"));
        };
        fused.shares_residual(step.rows, self.info.hidden_size, self.info.dtype).map_err(Reason::NoGain)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_norm_is_taken_once_by_what_contains_it() {
        use Fusion::{Add, AddNorm, NormAdd, Nothing};
        use Part::{AddNorm as Added, Mixer, Norm};
        let [mixer, mlp, head] = [Reader::Mixer(0), Reader::Mlp(0), Reader::LmHead];
        let program = |fusion: Fusion, experts: Fusion| -> Vec<Part> {
            let mut writer = Writer { launches: Vec::new(), layer: 0, normed: false };
            writer.sublayer(Mixer(fusion), fusion, [mixer, mlp], Sums::Own);
            writer.sublayer(Part::Mlp(MoeForm::modular(experts)), experts, [mlp, head], Sums::OfRanks);
            writer.norm(head);
            writer.launches.iter().map(|launch| launch.part).collect()
        };
        let experts = |fusion| Part::Mlp(MoeForm::modular(fusion));
        let apart = [Norm(mixer), Mixer(Nothing), Added(mlp, Sums::Own)];
        let to_head = Added(head, Sums::OfRanks);
        assert_eq!(program(Nothing, Nothing), [&apart[..], &[experts(Nothing), to_head]].concat());
        assert_eq!(program(Nothing, AddNorm), [&apart[..], &[experts(AddNorm)]].concat());
        assert_eq!(program(Add, AddNorm), [Norm(mixer), Mixer(Add), Norm(mlp), experts(AddNorm)]);
        assert_eq!(program(NormAdd, NormAdd), [Mixer(NormAdd), experts(NormAdd), Norm(head)]);
    }
}
