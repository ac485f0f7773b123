package graphopt;

import ai.onnxruntime.OnnxJavaType;
import ai.onnxruntime.OnnxTensor;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;

/** Reads and rounds the numbers of tensors. */
final class Numbers {
    private Numbers() {}

    /** A copy of the numbers of a tensor. */
    static ByteBuffer of(OnnxTensor tensor) {
        return tensor.getByteBuffer().order(ByteOrder.nativeOrder());
    }

    /** The number at a place. */
    static double at(ByteBuffer bytes, OnnxJavaType type, int i) {
        switch (type) {
            case FLOAT: return bytes.getFloat(4 * i);
            case DOUBLE: return bytes.getDouble(8 * i);
            case INT64: return bytes.getLong(8 * i);
            case INT32: return bytes.getInt(4 * i);
            case INT16: return bytes.getShort(2 * i);
            case INT8: return bytes.get(i);
            case BFLOAT16: return Float.intBitsToFloat(bytes.getShort(2 * i) << 16);
            case FLOAT16: return half(bytes.getShort(2 * i));
            default: return bytes.get(i) & 255;
        }
    }

    /** Writes numbers from a place on to an array. */
    static void read(ByteBuffer bytes, OnnxJavaType type, int first, int count, double[] x) {
        if (type == OnnxJavaType.FLOAT) {
            float[] narrow = new float[count];
            bytes.position(4 * first);
            bytes.asFloatBuffer().get(narrow);
            bytes.position(0);
            for (int i = 0; i < count; i++) x[i] = narrow[i];
        } else for (int i = 0; i < count; i++) x[i] = at(bytes, type, first + i);
    }

    static double half(short bits) {
        int exponent = bits >> 10 & 31, fraction = bits & 1023;
        double size = exponent == 31 ? (fraction == 0 ? Double.POSITIVE_INFINITY : Double.NaN)
            : exponent == 0 ? Math.scalb((double) fraction, -24) : Math.scalb(1024.0 + fraction, exponent - 25);
        return bits < 0 ? -size : size;
    }

    /** The bits of the float16 or bfloat16 number nearest to a number, ties to even. */
    static short narrow(OnnxJavaType type, double x) {
        int bits = Float.floatToRawIntBits((float) x), sign = bits >>> 16 & 0x8000;
        if (type == OnnxJavaType.BFLOAT16) return (short) (Double.isNaN(x) ? 0x7fc0 : bits + 0x7fff + (bits >>> 16 & 1) >>> 16);
        if (!(Math.abs(x) < 65520)) return (short) (sign | (Double.isNaN(x) ? 0x7e00 : 0x7c00));
        int exponent = Math.max(Math.getExponent(x), -14);
        double scaled = Math.rint(Math.scalb(Math.abs(x), 10 - exponent)); // ties to even
        return (short) (sign | (exponent + 14) * 1024 + (int) scaled);
    }
}
