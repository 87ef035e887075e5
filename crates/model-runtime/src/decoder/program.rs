//! The program of a step: which launches compute the layers, in their order.
//!
//! It is a pure function of the layers, the step and the machine. [`CausalLm::forward`](crate::CausalLm::forward) walks it, and
//! explanations are made out of it (`explain.rs`); what it leaves open, which kernel an op takes, the op asks of
//! `moe_kernels::plan`, as the explanation does.

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

/// What is launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    /// The norm of the residual stream that this one reads.
    Norm(Reader),
    /// The mixer, with what its launches contain of what is around it.
    Mixer(Fusion),
    /// The addition to the residual stream of what the part before left, with the norm that this one reads.
    AddNorm(Reader, Sums),
    /// From here on there are as many rows, those whose logits are wanted; `normed`: their norm has been taken.
    Keep { rows: usize, normed: bool },
    /// The MLP or the experts, in a form that says what their launches contain of what is around them.
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

/// Whose results an addition to the residual stream adds up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sums {
    /// This rank's: they are whole.
    Own,
    /// The results of all ranks, to all rows.
    OfRanks,
    /// The results of all ranks; each rank adds them to its share of the rows, and keeps the residual stream of these rows alone.
    Shared,
}

impl Sums {
    /// What plans call a norm that adds up what ranks hold.
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
    /// Whether the norm that comes next has been taken.
    normed: bool,
}

impl Writer {
    fn push(&mut self, part: Part) {
        self.launches.push(Launch { layer: self.layer, part });
    }

    /// The norm that `reader` reads, where it has not been taken.
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
    /// The launches of all layers in such a step. Where no logits are wanted it may end before the last MLP.
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

    /// What reads the norm after a layer.
    pub(super) fn after(&self, layer: usize) -> Reader {
        if layer + 1 < self.layers.len() { Reader::Mixer(layer + 1) } else { Reader::LmHead }
    }

    /// Whether the rows of such a step that need no logits end with the last layer's attention, which caches them.
    fn drops_rows(&self, step: &PlanStep) -> bool {
        let routes_by_number = match self.layers.last().map(|layer| &layer.mlp) {
            Some(Mlp::Sparse(sparse)) => sparse.routes_by_number(),
            _ => false,
        };
        let few = step.logits < step.rows && step.scored == 0;
        self.ends_few && few && step.asks().is_none() && !routes_by_number
    }

    /// Whether the ranks that add up in norms keep the residual stream of some of a step's rows each, or why all keep all of it.
    ///
    /// # Errors
    /// The reason.
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
