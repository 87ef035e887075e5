//! Parts of ranks on GPUs that are not layers, one rank after the other on one GPU: the parts of a vocabulary together
//! make the whole, and the parts of random weights are parts of one GPU's weights.

use candle_core::DType;
use moe_comm::{partition, shares};
use moe_kernels::cuda::{embed_part_into, fill_random_box_into, fill_random_into, join_columns_into};
use moe_kernels::{Buffer, Exec, embedding_into};

use crate::common::{FLOATS, Rng, cuda, streams};

fn put(ex: &Exec, host: &Buffer) -> Buffer {
    let mut data = ex.zeros(host.dtype(), host.dims()).unwrap();
    ex.copy_from_host(host.view(), data.view_mut()).unwrap();
    data
}

fn floats(ex: &Exec, data: &Buffer) -> Vec<f32> {
    ex.to_host(data.view()).unwrap().view().to_f32_vec().unwrap()
}

#[test]
fn each_id_is_embedded_by_one_rank() {
    let ex = cuda();
    let mut rng = Rng::new();
    for (vocab, width, tokens, ranks) in [(1000, 64, 9, 4), (101, 24, 1, 3), (7, 5, 40, 4), (64, 8, 0, 2)] {
        for dtype in FLOATS {
            for out in streams(dtype) {
                let table = rng.floats(dtype, &[vocab, width]);
                let ids = rng.ids(vocab, &[tokens]);
                let mut want = Buffer::zeros(out, &[tokens, width]).unwrap();
                embedding_into(table.view(), ids.view(), want.view_mut(), &mut Exec::cpu()).unwrap();
                let ids = put(&ex, &ids);
                let mut sum = vec![0f32; tokens * width];
                for rank in 0..ranks {
                    let run = partition(vocab, ranks, rank);
                    let mut part = ex.zeros(dtype, &[run.len(), width]).unwrap();
                    ex.copy_from_host(table.view().narrow(run.start, run.len()).unwrap(), part.view_mut())
                        .unwrap();
                    let mut rows = ex.zeros(out, &[tokens, width]).unwrap();
                    embed_part_into(part.view(), run.start, ids.view(), rows.view_mut(), &ex).unwrap();
                    sum.iter_mut().zip(floats(&ex, &rows)).for_each(|(sum, x)| *sum += x);
                }
                assert_eq!(sum, want.view().to_f32_vec().unwrap(), "{vocab} ids over {ranks} ranks");
            }
        }
    }
}

#[test]
fn columns_of_ranks_are_joined() {
    let ex = cuda();
    let mut rng = Rng::new();
    for (rows, width, ranks) in [(1, 16, 4), (3, 1000, 4), (5, 101, 3), (2, 3, 4), (64, 4097, 2), (0, 8, 2)] {
        let whole = rng.floats(DType::F32, &[rows, width]).view().to_f32_vec().unwrap();
        let mut parts = Vec::new();
        let mut first = 0;
        for columns in shares(width, ranks) {
            whole.chunks(width).for_each(|row| parts.extend_from_slice(&row[first..first + columns]));
            first += columns;
        }
        let parts = put(&ex, &Buffer::from_vec(parts, &[rows * width]).unwrap());
        let mut out = ex.zeros(DType::F32, &[rows, width]).unwrap();
        join_columns_into(parts.view(), ranks, out.view_mut(), &ex).unwrap();
        assert_eq!(floats(&ex, &out), whole, "{rows} rows of {width} columns of {ranks} ranks");
    }
}

#[test]
fn parts_of_random_weights_are_those_of_the_whole() {
    let ex = cuda();
    let [e, r, c] = [3usize, 10, 13];
    for dims in [vec![e, r, c], vec![r, c]] {
        let mut whole = ex.zeros(DType::BF16, &dims).unwrap();
        fill_random_into(whole.view_mut(), 77, 0, 0.5, &ex).unwrap();
        let whole = floats(&ex, &whole);
        for (matrix, rows, columns) in
            [(0..e, 0..r, 0..c), (1..2, 3..7, 0..c), (2..3, 0..r, 5..9), (1..3, 9..10, 12..13)]
        {
            let ranges = [matrix, rows, columns];
            let ranges = &ranges[3 - dims.len()..];
            let lens: Vec<usize> = ranges.iter().map(|range| range.len()).collect();
            let mut part = ex.zeros(DType::BF16, &lens).unwrap();
            fill_random_box_into(part.view_mut(), &dims, ranges, 77, 0.5, &ex).unwrap();
            let first = if dims.len() == 3 { ranges[0].clone() } else { 0..1 };
            let rows = &ranges[dims.len() - 2];
            let columns = &ranges[dims.len() - 1];
            let starts = first.flat_map(|m| rows.clone().map(move |i| (m * r + i) * c));
            let want: Vec<f32> =
                starts.flat_map(|start| whole[start + columns.start..start + columns.end].to_vec()).collect();
            assert_eq!(floats(&ex, &part), want, "{ranges:?} of {dims:?}");
        }
    }
    let mut out = ex.zeros(DType::BF16, &[2, 2]).unwrap();
    for ranges in [[0..2, 12..14], [0..3, 0..2]] {
        assert!(fill_random_box_into(out.view_mut(), &[r, c], &ranges, 77, 0.5, &ex).is_err(), "{ranges:?}");
    }
}
