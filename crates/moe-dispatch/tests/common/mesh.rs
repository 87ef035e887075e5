//! An all-to-all backend over channels between threads. It shows that the contract supports real communication without
//! a communicator.

use std::sync::Mutex;
use std::sync::mpsc::{Receiver, Sender, channel};

use moe_dispatch::candle::{DType, Error, Result};
use moe_dispatch::{
    ActivationFormat, Combine, Dispatched, Exec, LocalExperts, PrepareFinalize, Tokens, View, ViewMut,
    WeightAndReduce, weighted_sum_into,
};

/// Rows and their numbers.
type Packet = (Vec<f32>, Vec<u32>);

/// The channels of one rank to and from every rank.
pub struct Mesh {
    to: Vec<Sender<Packet>>,
    from: Vec<Receiver<Packet>>,
}

impl Mesh {
    /// Makes the meshes of all ranks.
    pub fn connect(ranks: usize) -> Vec<Mesh> {
        let mut meshes: Vec<_> = (0..ranks).map(|_| Mesh { to: Vec::new(), from: Vec::new() }).collect();
        for from in 0..ranks {
            for to in 0..ranks {
                let (sender, inbox) = channel();
                meshes[from].to.push(sender);
                meshes[to].from.push(inbox);
            }
        }
        meshes
    }
}

/// The place of every physical expert: (rank, local slot).
#[derive(Clone, Debug)]
pub struct Placement(pub Vec<(usize, usize)>);

impl Placement {
    pub fn local_experts(&self, rank: usize) -> Result<LocalExperts> {
        let map: Vec<i32> =
            self.0.iter().map(|&(r, slot)| if r == rank { slot as i32 } else { -1 }).collect();
        LocalExperts::from_map(&map, self.0.iter().filter(|(r, _)| *r == rank).count())
    }

    /// The local slot of an id on this rank.
    fn local(&self, rank: usize, id: u32) -> Option<usize> {
        self.0.get(id as usize).filter(|(r, _)| *r == rank).map(|&(_, slot)| slot)
    }
}

/// The data that the backend needs.
pub struct Peer {
    placement: Placement,
    experts: LocalExperts,
    mesh: Mutex<Mesh>,
    ranks: usize,
}

impl Peer {
    pub fn new(placement: &Placement, rank: usize, mesh: Mesh) -> Result<Self> {
        let experts = placement.local_experts(rank)?;
        let ranks = mesh.to.len();
        Ok(Self { placement: placement.clone(), experts, mesh: Mutex::new(mesh), ranks })
    }

    fn send(&self, packets: Vec<Packet>) -> Result<()> {
        let mesh = self.mesh.lock().map_err(|e| Error::msg(e.to_string()))?;
        mesh.to.iter().zip(packets).try_for_each(|(to, packet)| to.send(packet).map_err(Error::wrap))
    }

    fn receive(&self) -> Result<Vec<Packet>> {
        let mesh = self.mesh.lock().map_err(|e| Error::msg(e.to_string()))?;
        mesh.from.iter().map(|from| from.recv().map_err(Error::wrap)).collect()
    }

    /// Slot rows return as (row, slot number). The owner sorts them and adds them.
    fn combine(&self, d: &Dispatched, out: ViewMut, ex: &mut Exec) -> Result<()> {
        let slots = d.owner_topk_ids.dims();
        let hidden = out.dims()[1];
        let mut ordered = ex.scratch(DType::F32, &[slots[0], slots[1], hidden])?;
        ordered.view_mut().cpu_mut::<f32>()?.fill(f32::NAN);
        for (rows, numbers) in self.receive()? {
            for (row, &slot) in rows.chunks(hidden).zip(&numbers) {
                ordered.view_mut().cpu_mut::<f32>()?[slot as usize * hidden..][..hidden].copy_from_slice(row);
            }
        }
        weighted_sum_into(ordered.view(), d.owner_topk_ids, d.owner_topk_weights, out, ex)
    }
}

/// Standard rows with exact counts. A rank gets one copy of a token, however many of its experts the token chose.
pub struct HighThroughput(pub Peer);

/// For each source rank: the owner's slot numbers of each row's K slots.
struct Origins(Vec<Vec<u32>>);

impl PrepareFinalize for HighThroughput {
    fn name(&self) -> &'static str {
        "HighThroughput"
    }
    fn activation_format(&self) -> ActivationFormat {
        ActivationFormat::Standard
    }
    fn combine(&self) -> Combine {
        Combine::BySlot
    }
    fn num_dispatchers(&self) -> usize {
        self.0.ranks
    }

    fn prepare<'a>(
        &'a self,
        Tokens { hidden, topk_ids, topk_weights }: Tokens<'a>,
        _: Option<&[usize]>,
        ex: &mut Exec,
    ) -> Result<Dispatched<'a>> {
        let width = hidden.dims()[1];
        let top_k = topk_ids.dims()[1];
        let mut packets = vec![Packet::default(); self.0.ranks];
        for (t, ids) in topk_ids.cpu::<u32>()?.chunks(top_k).enumerate() {
            for (rank, (rows, meta)) in packets.iter_mut().enumerate() {
                if ids.iter().any(|&id| self.0.placement.local(rank, id).is_some()) {
                    rows.extend_from_slice(&hidden.cpu::<f32>()?[t * width..][..width]);
                    meta.push(t as u32);
                    meta.extend_from_slice(ids);
                }
            }
        }
        self.0.send(packets)?;
        let packets = self.0.receive()?;
        let count = packets.iter().map(|(_, meta)| meta.len() / (top_k + 1)).sum();
        let mut rows = ex.scratch(DType::F32, &[count, width])?;
        let mut ids = ex.scratch(DType::U32, &[count, top_k])?;
        let arrived: Vec<f32> = packets.iter().flat_map(|(rows, _)| rows.clone()).collect();
        rows.view_mut().cpu_mut()?.copy_from_slice(&arrived);
        let entries = packets.iter().flat_map(|(_, meta)| meta.chunks(top_k + 1));
        let arrived: Vec<u32> = entries.flat_map(|entry| entry[1..].to_vec()).collect();
        ids.view_mut().cpu_mut()?.copy_from_slice(&arrived);
        let tokens =
            |(_, meta): &Packet| meta.chunks(top_k + 1).map(|entry| entry[0] * top_k as u32).collect();
        let origins = Origins(packets.iter().map(tokens).collect());
        let mut d = Dispatched::standard(rows, topk_ids, topk_weights);
        d.topk_ids = Some(ids.into());
        d.topk_weights = None;
        d.expert_map = self.0.experts.expert_map();
        Ok(d.with_handle(origins))
    }

    fn finalize(
        &self,
        expert_out: View,
        d: &Dispatched,
        _: WeightAndReduce,
        out: ViewMut,
        ex: &mut Exec,
    ) -> Result<()> {
        let Origins(origins) = d.handle(self.name())?;
        let top_k = expert_out.dims()[1];
        let width = expert_out.dims()[2];
        let y = expert_out.cpu::<f32>()?;
        let map = d.expert_map.map(|map| map.cpu::<i32>()).transpose()?;
        let mut computed = d.topk_ids()?.cpu::<u32>()?.iter().zip(y.chunks(width));
        let mut packets = Vec::new();
        for first_slots in origins {
            let (mut rows, mut numbers) = Packet::default();
            for &first in first_slots {
                for ((&id, row), k) in computed.by_ref().take(top_k).zip(0..) {
                    if map.and_then(|map| map.get(id as usize)).is_some_and(|&local| local != -1) {
                        rows.extend_from_slice(row);
                        numbers.push(first + k);
                    }
                }
            }
            packets.push((rows, numbers));
        }
        self.0.send(packets)?;
        self.0.combine(d, out, ex)
    }
}
