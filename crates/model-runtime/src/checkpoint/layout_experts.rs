//! The tensors of a layer's experts: one by one or packed, whole experts of a rank or its part of each.

use std::ops::Range;

use moe_comm::GeometryError;
use moe_kernels::names::{MlpNames, PackOrder};

use super::layout::{SharedPacks, TensorLayout};
use super::slice::{SliceOrder, TensorSlice};

/// How a checkpoint holds the experts of a layer.
#[derive(Clone, Copy, Debug)]
pub struct StoredExperts<'a> {
    /// Prefix of their tensors.
    pub prefix: &'a str,
    /// The names of their matrices.
    pub names: &'a MlpNames,
    /// All experts in one tensor for each product, instead of one by one.
    pub packed: bool,
    /// Whether the products have biases, and if so, whether these are packed.
    pub biases: Option<BiasStorage>,
    /// Experts E, hidden size H and intermediate size I.
    pub sizes: [usize; 3],
}

/// How a checkpoint holds the biases of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum BiasStorage {
    /// Each expert has its own tensors.
    Single,
    /// Each product has one tensor with the biases of all experts.
    Packed,
}

impl StoredExperts<'_> {
    fn gate_up(&self) -> String {
        format!("{}.{}", self.prefix, self.names.packed_gate_up)
    }

    fn down(&self) -> String {
        format!("{}.{}", self.prefix, self.names.packed_down)
    }

    /// The parts of an expert on a rank that holds the columns `held` of the intermediate size. Each part has the name
    /// of the expert's own tensor, and the name of the pack to which it belongs; the parts are in the order of the
    /// packs.
    fn parts(&self, expert: usize, held: &Range<usize>) -> Vec<ExpertPart> {
        let [_, hidden, intermediate] = self.sizes;
        let names = self.names;
        let up = intermediate + held.start..intermediate + held.end;
        let mut parts = vec![
            self.matrix(expert, names.gate, "w13", [held.clone(), 0..hidden], held.clone()),
            self.matrix(expert, names.up, "w13", [held.clone(), 0..hidden], up.clone()),
            self.matrix(expert, names.down, "w2", [0..hidden, held.clone()], 0..hidden),
        ];
        if self.biases.is_some() {
            parts.extend([
                self.vector(expert, names.gate, "w13_bias", held.clone(), held.clone()),
                self.vector(expert, names.up, "w13_bias", held.clone(), up),
                self.vector(expert, names.down, "w2_bias", 0..hidden, 0..hidden),
            ]);
        }
        parts
    }

    /// A matrix whose part on this rank is the box `ranges`. `packed_rows` are its rows in a pack that is stored by
    /// rows.
    fn matrix(
        &self,
        expert: usize,
        name: &str,
        pack: &'static str,
        ranges: [Range<usize>; 2],
        packed_rows: Range<usize>,
    ) -> ExpertPart {
        let single = format!("{}.{expert}.{name}.weight", self.prefix);
        let [rows, columns] = ranges;
        let is_down = name == self.names.down;
        let stored = if is_down { self.down() } else { self.gate_up() };
        let slice = match (self.packed, self.names.pack_order) {
            (false, _) => TensorSlice::renamed(&single, &single, &[rows, columns]),
            (true, PackOrder::Rows) => {
                TensorSlice::renamed(&single, stored, &[expert..expert + 1, packed_rows, columns])
            }
            (true, PackOrder::Columns { .. }) if is_down => {
                let down = TensorSlice::renamed(&single, stored, &[expert..expert + 1, columns, rows]);
                down.in_order(SliceOrder { step: 1, transposed: true })
            }
            (true, PackOrder::Columns { in_turns: false }) => {
                let half = TensorSlice::renamed(&single, stored, &[expert..expert + 1, columns, packed_rows]);
                half.in_order(SliceOrder { step: 1, transposed: true })
            }
            (true, PackOrder::Columns { in_turns: true }) => {
                let turns = self.turns(name, &rows);
                let half = TensorSlice::renamed(&single, stored, &[expert..expert + 1, columns, turns]);
                half.in_order(SliceOrder { step: 2, transposed: true })
            }
        };
        ExpertPart { slice, pack }
    }

    /// A bias, with the same arguments as [`matrix`](Self::matrix).
    fn vector(
        &self,
        expert: usize,
        name: &str,
        pack: &'static str,
        range: Range<usize>,
        packed: Range<usize>,
    ) -> ExpertPart {
        let single = format!("{}.{expert}.{name}.bias", self.prefix);
        let is_down = name == self.names.down;
        let stored = format!("{}_bias", if is_down { self.down() } else { self.gate_up() });
        let packed_bias = self.biases == Some(BiasStorage::Packed);
        let slice = match (packed_bias, self.names.pack_order) {
            (false, _) => TensorSlice::renamed(&single, &single, &[range]),
            (true, PackOrder::Columns { in_turns: true }) if !is_down => {
                let half =
                    TensorSlice::renamed(&single, stored, &[expert..expert + 1, self.turns(name, &range)]);
                half.in_order(SliceOrder { step: 2, transposed: false })
            }
            (true, _) => TensorSlice::renamed(&single, stored, &[expert..expert + 1, packed]),
        };
        ExpertPart { slice, pack }
    }

    /// The range of the rows `held` of gate or of up, if rows of gate and up alternate, gate first. Only every second
    /// row of this range, from the first one on, belongs to the matrix.
    fn turns(&self, name: &str, held: &Range<usize>) -> Range<usize> {
        let first = usize::from(name == self.names.up);
        match held.is_empty() {
            true => 0..0,
            false => 2 * held.start + first..2 * held.end - 1 + first,
        }
    }
}

/// A part of an expert, under the name of the expert's own tensor, and the pack that it is a part of.
struct ExpertPart {
    slice: TensorSlice,
    pack: &'static str,
}

impl TensorLayout {
    /// The tensors of E experts of [H, I], one by one, or packed as transformers 5 writes them: whole experts of this
    /// rank, or its part of each expert. Packed experts are listed one by one in two cases: if ranks share them, so
    /// that a rank reads only its own, and if packs have another order than modules expect. The rank's packs are listed
    /// too, if they are not stored.
    ///
    /// With `shared`, there are also packs in which shared experts follow the others, and packs of whole experts are
    /// listed too.
    ///
    /// # Errors
    /// Sizes that the geometry cannot cut.
    pub fn experts(
        &mut self,
        stored: &StoredExperts<'_>,
        shared: Option<SharedPacks<'_>>,
    ) -> Result<(), GeometryError> {
        let &StoredExperts { prefix, names, packed, biases, sizes: [experts, hidden, intermediate] } = stored;
        let held = self.geometry.expert_intermediate(intermediate)?.range;
        if packed {
            self.stored_packs(stored);
        } else {
            for expert in 0..experts {
                self.mlp(&format!("{prefix}.{expert}"), names, [hidden, intermediate], &held);
            }
        }
        match biases {
            Some(BiasStorage::Packed) => {
                self.whole(format!("{}_bias", stored.gate_up()), &[experts, 2 * intermediate]);
                self.whole(format!("{}_bias", stored.down()), &[experts, hidden]);
            }
            Some(BiasStorage::Single) => {
                for expert in 0..experts {
                    self.mlp_biases(&format!("{prefix}.{expert}"), names, [hidden, intermediate], &held);
                }
            }
            None => {}
        }
        let first = self.packs.len();
        let is_cut = self.geometry.ep_size > 1 || self.geometry.moe_tp_size > 1;
        if packed && !is_cut && names.pack_order == PackOrder::Rows {
            if let Some(shared) = shared {
                let whole = |rows, columns| [0..experts, 0..rows, 0..columns];
                let w13 = &whole(2 * intermediate, hidden);
                let w13 = TensorSlice::renamed(format!("{prefix}.w13"), stored.gate_up(), w13);
                let w2 = &whole(hidden, intermediate);
                let w2 = TensorSlice::renamed(format!("{prefix}.w2"), stored.down(), w2);
                self.packs.extend([w13, w2]);
                self.packs_with_shared(first, prefix, names, [hidden, intermediate], &shared, &held);
            }
            return Ok(());
        }
        let layout = self.geometry.expert_layout(experts)?;
        for e in 0..experts {
            let here = layout.local_experts.binary_search(&(e as u32)).is_ok();
            for ExpertPart { slice, pack } in stored.parts(e, &held) {
                if here {
                    let name = format!("{prefix}.{pack}");
                    self.packs.push(TensorSlice { name, ..slice.clone() });
                }
                // If the checkpoint has packs, single experts are slices of them. If it has single experts, the experts
                // of other ranks are absent.
                if slice.stored != slice.name {
                    let shown = if here { &mut self.slices } else { &mut self.elsewhere };
                    shown.push(slice);
                } else if !here {
                    self.absent.push(slice.stored);
                }
            }
        }
        if let Some(shared) = shared.filter(|_| self.geometry.ep_size == 1) {
            self.packs_with_shared(first, prefix, names, [hidden, intermediate], &shared, &held);
        }
        Ok(())
    }

    /// The packs as they are stored.
    fn stored_packs(&mut self, stored: &StoredExperts<'_>) {
        let [experts, hidden, intermediate] = stored.sizes;
        let (gate_up, down) = match stored.names.pack_order {
            PackOrder::Rows => ([2 * intermediate, hidden], [hidden, intermediate]),
            PackOrder::Columns { .. } => ([hidden, 2 * intermediate], [intermediate, hidden]),
        };
        self.whole(stored.gate_up(), &[experts, gate_up[0], gate_up[1]]);
        self.whole(stored.down(), &[experts, down[0], down[1]]);
    }

    /// The biases of one expert's products; that of down is on every rank.
    fn mlp_biases(
        &mut self,
        prefix: &str,
        names: &MlpNames,
        [hidden, intermediate]: [usize; 2],
        held: &Range<usize>,
    ) {
        for name in [names.gate, names.up] {
            self.part(format!("{prefix}.{name}.bias"), &[intermediate], std::slice::from_ref(held));
        }
        self.whole(format!("{prefix}.{}.bias", names.down), &[hidden]);
    }

    /// Lists the packs from `first` on once more, under another prefix, with shared experts after the routed ones. Each
    /// shared expert is I rows of the stored gate and up matrices and I columns of the down matrix, cut like the routed
    /// ones.
    fn packs_with_shared(
        &mut self,
        first: usize,
        prefix: &str,
        names: &MlpNames,
        [hidden, intermediate]: [usize; 2],
        shared: &SharedPacks<'_>,
        held: &Range<usize>,
    ) {
        let own = self.packs[first..].iter().map(|part| {
            let name = part.name.replacen(prefix, shared.packs, 1);
            TensorSlice { name, ..part.clone() }
        });
        let mut parts: Vec<_> = own.collect();
        for expert in 0..shared.count {
            let held = expert * intermediate + held.start..expert * intermediate + held.end;
            for (projection, pack, ranges) in [
                (names.gate, "w13", [held.clone(), 0..hidden]),
                (names.up, "w13", [held.clone(), 0..hidden]),
                (names.down, "w2", [0..hidden, held.clone()]),
            ] {
                let stored = format!("{}.{projection}.weight", shared.stored);
                parts.push(TensorSlice::renamed(format!("{}.{pack}", shared.packs), stored, &ranges));
            }
        }
        self.packs.extend(parts);
    }
}
