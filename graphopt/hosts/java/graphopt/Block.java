package graphopt;

import ai.onnxruntime.OnnxJavaType;
import ai.onnxruntime.OnnxTensor;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.util.List;
import java.util.Map;

/** A block of the numbers of a state, which strides place in it and in the file of an adapter. */
final class Block {
    private Block() {}

    /** Puts a block, times a factor, into a file. */
    static void put(byte[] content, Map<String, ?> block, Map<String, OnnxTensor> known) throws GraphoptException {
        long[] shape = whole(block.get("shape")), to = whole(block.get("strides")), from = whole(block.get("state_strides"));
        long[] ends = whole(java.util.Arrays.asList(block.get("offset"), block.get("first")));
        OnnxTensor tensor = known.get(String.valueOf(block.get("state")));
        OnnxJavaType type = tensor == null ? null : tensor.getInfo().type;
        boolean isNarrow = block.get("type") instanceof String;
        if ((type != OnnxJavaType.FLOAT && (type != OnnxJavaType.DOUBLE || isNarrow)) || to.length != shape.length || from.length != shape.length
            || !(block.get("factor") instanceof Number)) throw refused();
        double factor = ((Number) block.get("factor")).doubleValue();
        OnnxJavaType made = !isNarrow ? type : "bfloat16".equals(block.get("type")) ? OnnxJavaType.BFLOAT16 : OnnxJavaType.FLOAT16;
        ByteBuffer numbers = Numbers.of(tensor), file = ByteBuffer.wrap(content).order(ByteOrder.LITTLE_ENDIAN);
        long held = numbers.remaining() / type.size, count = 1, lastFrom = ends[1], lastTo = 0;
        for (int i = 0; i < shape.length; i++) {
            if (shape[i] == 0 || count > held / shape[i]) throw refused();
            count *= shape[i];
            lastFrom += (shape[i] - 1) * from[i];
            lastTo += (shape[i] - 1) * to[i];
            if (lastFrom >= held || lastTo >= content.length) throw refused();
        }
        if (lastFrom >= held || ends[0] > content.length || lastTo >= (content.length - ends[0]) / made.size) throw refused();
        for (long n = 0; n < count; n++) {
            long source = ends[1], place = 0, left = n;
            for (int i = shape.length - 1; i >= 0; left /= shape[i--]) {
                source += left % shape[i] * from[i];
                place += left % shape[i] * to[i];
            }
            int at = (int) (ends[0] + made.size * place);
            if (type == OnnxJavaType.DOUBLE) file.putDouble(at, factor * numbers.getDouble(8 * (int) source));
            else {
                float x = (float) factor * numbers.getFloat(4 * (int) source);
                if (isNarrow) file.putShort(at, Numbers.narrow(made, x));
                else file.putFloat(at, x);
            }
        }
    }

    private static GraphoptException refused() {
        return new GraphoptException("host.json: adapters: expected blocks of its state, found others: write it with export_hosts");
    }

    /** Whole numbers from 0 below 2^31. */
    private static long[] whole(Object list) throws GraphoptException {
        if (!(list instanceof List) || ((List<?>) list).size() > 16) throw refused();
        long[] numbers = new long[((List<?>) list).size()];
        for (int i = 0; i < numbers.length; i++) {
            Object x = ((List<?>) list).get(i);
            if (!(x instanceof Long) || (Long) x < 0 || (Long) x > Integer.MAX_VALUE) throw refused();
            numbers[i] = (Long) x;
        }
        return numbers;
    }
}
