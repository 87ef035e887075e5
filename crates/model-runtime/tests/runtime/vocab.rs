//! A vocabulary over ranks: the embedding's rows and the head's logits are the same as on one rank.

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use model_runtime::{Embedding, Exec, LmHead, View, ViewMut, VocabParallel};
use moe_comm::{Communicator, partition, run_ranks};
use proptest::prelude::*;

fn table(vocab: usize, hidden: usize) -> Tensor {
    // Zeros of both signs, which a sum over ranks would not keep.
    let value = |i: usize| if i % 7 == 3 { -0.0 } else { ((i * 37 % 101) as f32 - 50.0) / 8.0 };
    Tensor::from_vec((0..vocab * hidden).map(value).collect(), (vocab, hidden), &Device::Cpu).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn ranks_have_the_bits_of_one(
        ranks in 1usize..6, vocab in 1usize..40, hidden in 1usize..9, half: bool,
        ids in prop::collection::vec(any::<u32>(), 0..9),
    ) {
        let dtype = if half { DType::BF16 } else { DType::F32 };
        let table = table(vocab, hidden).to_dtype(dtype).unwrap();
        let ids: Vec<u32> = ids.into_iter().map(|id| id % vocab as u32).collect();
        let run = |embedding: &Embedding, head: &LmHead| -> candle_core::Result<Vec<u32>> {
            let ex = &mut Exec::cpu();
            let t = ids.len();
            let mut rows = vec![7f32; t * hidden];
            let mut logits = vec![7f32; t * vocab];
            embedding.forward_into(View::new(&ids, &[t])?, ViewMut::new(&mut rows, &[t, hidden])?, ex)?;
            let x = Tensor::from_slice(&rows, (t, hidden), &Device::Cpu)?.to_dtype(dtype)?;
            let x = moe_kernels::TensorView::new(&x)?;
            head.forward_into(x.view()?, ViewMut::new(&mut logits, &[t, vocab])?, ex)?;
            Ok(rows.iter().chain(&logits).map(|x| x.to_bits()).collect())
        };
        let want = run(&Embedding::new(table.clone()).unwrap(), &LmHead::new(table.clone()).unwrap()).unwrap();
        let results = run_ranks(ranks, |rank, comm| {
            let part = partition(vocab, ranks, rank);
            let comm = Arc::new(comm) as Arc<dyn Communicator>;
            let part = table.narrow(0, part.start, part.len())?;
            let cut = VocabParallel::new(vocab, comm);
            run(
                &Embedding::new(part.clone())?.with_vocab_parallel(cut.clone()),
                &LmHead::new(part)?.with_vocab_parallel(cut),
            )
        });
        for got in results {
            prop_assert_eq!(&got.unwrap(), &want);
        }
    }
}

#[test]
fn an_unknown_id_is_an_error_on_every_rank() {
    let results = run_ranks(2, |rank, comm| {
        let table = table(8, 2).narrow(0, rank * 4, 4)?;
        let embedding = Embedding::new(table)?.with_vocab_parallel(VocabParallel::new(8, Arc::new(comm)));
        let mut rows = [0f32; 4];
        embedding.forward_into(
            View::new(&[3u32, 8], &[2])?,
            ViewMut::new(&mut rows, &[2, 2])?,
            &mut Exec::cpu(),
        )
    });
    for result in results {
        let e = result.unwrap_err().to_string();
        assert!(e.contains("id 8 at position 1 is out of range; expected 0..8"), "{e}");
    }
}
